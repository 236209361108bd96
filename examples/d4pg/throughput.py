"""Updates per second of the learner, against the same update written as a bare tf.function.

    python examples/d4pg/throughput.py                                   # batch 256 to 2048
    python examples/d4pg/throughput.py --preset cpu --replicas 1 2 --batches 128 256

Each contender runs in a process of its own (the bare one without keras_replicator), gets the same
batches of NumPy arrays, and returns priorities as NumPy arrays. Contenders take turns, and each
keeps the best of its rounds, so that other programs disturb them alike. Milliseconds are those of
the processor, of all threads, which other programs disturb less.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import numpy as np  # noqa: E402

from d4pg.config import PRESETS  # noqa: E402
from d4pg.environments import Spec  # noqa: E402

SPEC = Spec((24,), 6)  # as large as the walker's


def random_batch(rows, seed=0):
    """Returns a batch as the replay gives it."""
    random = np.random.default_rng(seed)
    observations = random.normal(size=(2, rows, *SPEC.observation_shape)).astype("float32")
    return {
        "observation": observations[0],
        "action": random.uniform(-1, 1, (rows, SPEC.action_size)).astype("float32"),
        "reward": random.uniform(0, 1, rows).astype("float32"),
        "discount": np.full(rows, 0.95, "float32"),
        "next_observation": observations[1],
        "weight": np.ones(rows, "float32"),
    }


def make_bare(config):
    """Returns `fn(batch) -> priorities` without the package: Keras models and a tf.function."""
    import keras
    import tensorflow as tf

    from d4pg.networks import build_models
    from d4pg.update import make_update

    models = build_models(config, SPEC, seed=0)
    optimizers = {
        name: keras.optimizers.Adam(rate, global_clipnorm=config.clip_norm)
        for name, rate in (
            ("policy", config.policy_learning_rate),
            ("critic", config.critic_learning_rate),
        )
    }
    for name, optimizer in optimizers.items():
        optimizer.build(models[name].trainable_variables)
    update = make_update(config, lambda: optimizers)
    compiled = tf.function(lambda batch: update(models, batch))
    return lambda batch: np.asarray(compiled(batch)[0])


def make_replicated(config, replicas):
    """Returns `fn(batch) -> priorities` of the learner on a number of replicas."""
    import keras_replicator as kr
    from d4pg.learner import Learner

    kr.simulate_devices(replicas)
    learner = Learner(config, SPEC, replicas, seed=0)
    return lambda batch: learner.update(batch)[0]


def contend(contender, preset, batches):
    """Measures for each line of the standard input, and prints `[updates per second, ms]`.

    Args:
        contender: 0 for the bare function, else the number of replicas.
        preset: name of a preset.
        batches: numbers of rows.
    """
    config = PRESETS[preset]
    update = make_replicated(config, contender) if contender else make_bare(config)
    data = {rows: random_batch(rows) for rows in batches}
    for batch in data.values():
        for _ in range(5):
            update(batch)
    print("ready", flush=True)
    for line in sys.stdin:
        rows, seconds = int(line.split()[0]), float(line.split()[1])
        count, began, processor = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < began + seconds:
            update(data[rows])
            count += 1
        speed = count / (time.perf_counter() - began)
        print(json.dumps([speed, 1000 * (time.process_time() - processor) / count]), flush=True)


def measure(preset, replicas, batches, rounds, seconds):
    """Returns `{contender: {rows: (updates per second, ms)}}`; 0 is the bare function."""
    contenders = [0, *replicas]
    processes = {
        contender: subprocess.Popen(
            [
                sys.executable,
                __file__,
                *("--contender", str(contender), "--preset", preset, "--batches"),
                *map(str, batches),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for contender in contenders
    }
    best = {contender: dict.fromkeys(batches, (0.0, np.inf)) for contender in contenders}
    try:
        for process in processes.values():
            while process.stdout.readline().strip() != "ready":
                if process.poll() is not None:
                    raise RuntimeError("A contender has ended; its messages are above.")
        for turn in range(rounds):
            for rows in batches:
                # Every second round backwards, so that nobody always comes first.
                for contender in contenders[:: 1 if turn % 2 == 0 else -1]:
                    process = processes[contender]
                    process.stdin.write(f"{rows} {seconds}\n")
                    process.stdin.flush()
                    speed, milliseconds = json.loads(process.stdout.readline())
                    fastest, fewest = best[contender][rows]
                    best[contender][rows] = max(fastest, speed), min(fewest, milliseconds)
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return best


def main():
    """Reads the command line and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="published", choices=sorted(PRESETS))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--contender", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender is not None:
        return contend(given.contender, given.preset, given.batches)
    best = measure(given.preset, given.replicas, given.batches, given.rounds, given.seconds)
    names = ["bare tf.function"] + [f"{n} replica{'s' * (n > 1)}" for n in given.replicas]
    print("| batch |" + "".join(f" {name}: updates/s | processor ms |" for name in names))
    print("|---|" + "---|---|" * len(names))
    for rows in given.batches:
        bare = best[0][rows]
        cells = [f" {bare[0]:.1f} | {bare[1]:.1f} |"]
        for speed, milliseconds in (best[n][rows] for n in given.replicas):
            cells.append(
                f" {speed:.1f} ({speed / bare[0]:.2f}) | "
                f"{milliseconds:.1f} ({bare[1] / milliseconds:.2f}) |"
            )
        print(f"| {rows} |" + "".join(cells))
    return None


if __name__ == "__main__":
    main()
