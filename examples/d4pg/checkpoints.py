"""Checkpoints of a run: the learner, the replay and the counters of the same update.

    folder/update-00005000/
      learner/      the trainer's own checkpoint: weights, optimizers
      worker_0/     replay.npz, and run.json with counters and history; written last

Each worker of a job writes its replay. A checkpoint counts when every worker's part is there.
"""

import json
import os
import pathlib
import shutil


def save(folder, learner, exchange, history, keep=2):
    """Writes a checkpoint; the older ones stay whole while it is written.

    Args:
        folder: folder of the run's checkpoints.
        learner: a `Learner`.
        exchange: an `Exchange`.
        history: list of dicts.
        keep: how many of the newest checkpoints stay.
    """
    plan = learner.trainer.plan
    path = pathlib.Path(folder) / f"update-{exchange.counters.updates:08d}"
    learner.trainer.save_checkpoint(path / "learner")
    part, final = path / f".worker_{plan.worker}", path / f"worker_{plan.worker}"
    for leftover in (part, final):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    counters = exchange.save(part / "replay.npz")
    state = json.dumps({"counters": counters, "history": history}, indent=1)
    (part / "run.json").write_text(state, encoding="utf-8")
    os.rename(part, final)
    if plan.is_chief:
        for old in complete(folder, plan.num_workers)[keep:]:
            shutil.rmtree(old)


def restore(folder, learner, exchange):
    """Takes the newest complete checkpoint, if there is one, and returns the history.

    Args:
        folder: folder of the run's checkpoints.
        learner: a `Learner`.
        exchange: an `Exchange`.

    Returns:
        List of dicts, empty for a new run.
    """
    plan = learner.trainer.plan
    found = complete(folder, plan.num_workers)
    if not found:
        return []
    learner.trainer.restore_checkpoint(found[0] / "learner")
    part = found[0] / f"worker_{plan.worker}"
    state = json.loads((part / "run.json").read_text(encoding="utf-8"))
    exchange.load(part / "replay.npz", state["counters"])
    return state["history"]


def complete(folder, num_workers=1):
    """Returns the paths of complete checkpoints, newest first."""
    return [
        path
        for path in sorted(pathlib.Path(folder).glob("update-*"), reverse=True)
        if all((path / f"worker_{worker}").is_dir() for worker in range(num_workers))
    ]
