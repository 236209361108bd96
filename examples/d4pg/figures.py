"""Draws finished runs: their curve, and a strip of images of the policy.

    python examples/d4pg/figures.py logs/d4pg --out docs/images/d4pg
    python examples/d4pg/figures.py logs/seed0 logs/seed1 logs/seed2 --out docs/images/d4pg

Writes `curve.png`, with a line for each run, and `frames.png`, an episode without noise of the
first one. Images of dm-control need a way to render: EGL, or what MUJOCO_GL says.
"""

import argparse
import json
import os
import pathlib
import sys

os.environ.setdefault("MUJOCO_GL", "egl")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import numpy as np  # noqa: E402

from d4pg.config import Config  # noqa: E402
from d4pg.environments import make_environment  # noqa: E402
from d4pg.policies import make_policy  # noqa: E402


def read_results(folder):
    """Returns `(config, history)` of a run."""
    results = json.loads((pathlib.Path(folder) / "results.json").read_text(encoding="utf-8"))
    return Config(**results["config"]), results["history"]


def frame_strip(folder, frames=8, size=160, seed=0):
    """Returns images of one episode of a run's policy, side by side.

    Args:
        folder: the run's folder.
        frames: number of images, evenly spread over the episode.
        size: height and width of each.
        seed: seed of the environment.

    Returns:
        Array `[size, frames * size, 3]` of uint8.
    """
    config, _ = read_results(folder)
    environment = make_environment(config, seed)
    policy = make_policy(config, environment.spec)
    with np.load(pathlib.Path(folder) / "policy.npz") as file:
        policy.load([file[name] for name in file.files])
    images, observation, last = [], environment.reset(), False
    while not last:
        images.append(environment.render(size))
        observation, _, _, last = environment.step(policy(observation))
    places = np.linspace(0, len(images) - 1, frames).round().astype(int)
    return np.concatenate([images[place] for place in places], axis=1)


def draw_curve(folders, path):
    """Draws the mean return of each evaluation against the steps of the actors.

    Args:
        folders: folders of runs.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained", sharey=True)
    for folder in folders:
        config, history = read_results(folder)
        returns = [entry["returns"] for entry in history]
        means = [np.mean(values) for values in returns]
        minutes = [entry["seconds"] / 60 for entry in history]
        for axis, x in zip(axes, ([entry["updates"] for entry in history], minutes)):
            axis.plot(x, means, marker=".", label=pathlib.Path(folder).name)
            axis.fill_between(x, list(map(min, returns)), list(map(max, returns)), alpha=0.2)
    axes[0].set(xlabel="learner updates", ylabel="return without noise")
    axes[1].set(xlabel="minutes")
    figure.suptitle(config.task)
    if len(folders) > 1:
        axes[0].legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="folders of runs (their --logdir)")
    parser.add_argument("--out", default=".", help="folder of the pictures")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    draw_curve(arguments.folders, out / "curve.png")

    from matplotlib import image

    image.imsave(out / "frames.png", frame_strip(arguments.folders[0]))
    print(f"wrote {out / 'curve.png'} and {out / 'frames.png'}")


if __name__ == "__main__":
    main()
