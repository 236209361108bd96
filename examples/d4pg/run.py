"""Trains D4PG: a learner on all devices of this machine (or of a job), and actors beside it.

    python examples/d4pg/run.py --preset cpu --replicas 2 --actors 2   # cartpole swingup on a CPU
    python examples/d4pg/run.py --preset published --actors 8 --task control:walker:walk
    python examples/d4pg/run.py --preset smoke --replicas 2            # seconds; no dm-control
    tensorboard --logdir logs/d4pg

Started again with the same --logdir, it goes on where the last checkpoint was written, with its
replay and its counters.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_replicator as kr  # noqa: E402
from d4pg import checkpoints  # noqa: E402
from d4pg.actors import Actors  # noqa: E402
from d4pg.config import PRESETS  # noqa: E402
from d4pg.environments import make_environment  # noqa: E402
from d4pg.exchange import Exchange, serve  # noqa: E402
from d4pg.learner import Learner  # noqa: E402
from d4pg.logs import Logs  # noqa: E402
from d4pg.policies import make_policy, run_episode  # noqa: E402


def train(config, replicas=None, logdir="logs/d4pg", seed=0):
    """Trains, and returns the history of evaluations.

    Args:
        config: a `Config`.
        replicas: devices of this machine to use; None for all. A machine without accelerators
            splits its CPU into that many.
        logdir: folder of logs and checkpoints.
        seed: seed of weights, replay, environments and noise.

    Returns:
        List of dicts with `updates`, `steps`, `seconds`, `returns`, `samples_per_insert`.
    """
    if replicas is not None and not tf.config.list_physical_devices("GPU"):
        kr.simulate_devices(replicas)
    os.environ.setdefault("MUJOCO_GL", "egl" if config.pixels else "disable")
    environment = make_environment(config, seed)
    # The trainer comes first: it connects the workers, which has to precede all TensorFlow work.
    learner = Learner(config, environment.spec, replicas, seed)
    plan = learner.trainer.plan
    print(plan)
    rows = config.batch_size // plan.num_workers  # each worker draws from a replay of its own
    exchange = Exchange(config, seed + plan.worker)
    folder = pathlib.Path(logdir)
    history = checkpoints.restore(folder / "checkpoints", learner, exchange)
    counters = exchange.counters
    if counters.updates:
        print(
            f"resumed at update {counters.updates}: {counters.samples} samples, "
            f"{counters.inserts} inserts, {counters.episodes} episodes"
        )
    policy = make_policy(config, environment.spec)
    logs = Logs(folder / "tensorboard" if plan.is_chief else None, exchange)
    exchange.publish(learner.policy_weights())
    began = time.monotonic() - counters.seconds
    with Actors(exchange, *serve(exchange), config.actors, seed + 10_000 * plan.worker) as actors:
        while counters.updates < config.updates:
            actors.revive()
            batch = exchange.sample(rows, timeout=1.0)
            if batch is None:
                continue
            priorities, learner_logs = learner.update(batch.rows)
            exchange.updated(batch, priorities)
            counters.seconds = time.monotonic() - began
            ends = counters.updates == config.updates
            logs.write(learner_logs, now=ends)
            if ends or counters.updates % config.publish_every == 0:
                exchange.publish(learner.policy_weights())
            if plan.is_chief and (ends or counters.updates % config.evaluate_every == 0):
                policy.load(learner.policy_weights())
                history.append(evaluate(policy, environment, exchange))
                logs.write_evaluation(history[-1]["returns"])
                save_results(folder, config, history, learner.policy_weights())
            if ends or counters.updates % config.checkpoint_every == 0:
                checkpoints.save(folder / "checkpoints", learner, exchange, history)
    return history


def evaluate(policy, environment, exchange):
    """Returns an entry of the history, with the returns of episodes without noise."""
    counters = exchange.counters
    entry = {
        "updates": counters.updates,
        "steps": counters.inserts,
        "seconds": round(counters.seconds, 1),
        "samples_per_insert": exchange.samples_per_insert(),
        "returns": [
            run_episode(policy, environment) for _ in range(exchange.config.evaluation_episodes)
        ],
    }
    print(
        f"update {entry['updates']}: {entry['steps']} steps of the actors, "
        f"{entry['seconds']:.0f} s, {entry['samples_per_insert']:.2f} samples per insert, "
        f"mean return {np.mean(entry['returns']):.1f}",
        flush=True,
    )
    return entry


def save_results(folder, config, history, weights):
    """Writes what `figures.py` needs: configuration, evaluations, and the policy."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {"config": dataclasses.asdict(config), "history": history}
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    np.savez(folder / "policy.npz", *weights)


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="cpu", choices=sorted(PRESETS))
    parser.add_argument("--task", help="'reach', or 'control:DOMAIN:TASK'")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--actors", type=int, help="processes that act")
    parser.add_argument("--updates", type=int)
    parser.add_argument("--batch-size", type=int, help="rows over all replicas")
    parser.add_argument("--logdir", default="logs/d4pg")
    parser.add_argument("--seed", type=int, default=0)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    config = PRESETS[given.pop("preset")]
    names = {field.name for field in dataclasses.fields(config)} & set(given)
    config = dataclasses.replace(config, **{name: given.pop(name) for name in names})
    history = train(config, **given)
    returns = history[-1]["returns"] if history else []
    if returns:
        print(
            f"mean return of {len(returns)} episodes without noise: {np.mean(returns):.1f}  "
            f"smallest: {min(returns):.1f}  largest: {max(returns):.1f}"
        )


if __name__ == "__main__":
    main()
