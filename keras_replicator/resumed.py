"""A checkpoint that a run goes on from: found alike by all workers, and what it says."""

import dataclasses
import os

import tensorflow as tf

from keras_replicator import checkpoints
from keras_replicator.checkpoints import CheckpointError


@dataclasses.dataclass
class Resumed:
    """What was read from a checkpoint.

    Args:
        path: The folder of the checkpoint.
        tensors: Dict of NumPy arrays.
        state: Dict of JSON values.
    """

    path: str
    tensors: dict
    state: dict

    @property
    def epoch(self):
        """Number of the epoch that goes on, or begins."""
        return self.state["epoch"]

    @property
    def step(self):
        """Steps of this epoch that were made; 0 where it begins."""
        return self.state["step"]

    @property
    def made(self):
        """Steps of the run before this epoch."""
        return self.state["total_steps"] - self.state["step"]

    @property
    def in_mid_epoch(self):
        """Whether the epoch has begun."""
        return self.step > 0

    @property
    def is_validating(self):
        """Whether the epoch's training is over, and its validation begins anew."""
        return self.state.get("validating", False)

    @property
    def stopped(self):
        """Whether a callback had ended the training, after an epoch or in the middle of one."""
        return self.state.get("stopped", False)

    @property
    def logs(self):
        """Logs of the last epoch, or of this one where its validation goes on; or None."""
        return self.state.get("logs")

    @property
    def position(self):
        """Where the run stands, as the next checkpoint says it."""
        names = ("epoch", "step", "total_steps", "logs", "stopped", "validating")
        return {name: self.state[name] for name in names if name in self.state}

    def report(self, engine, unmatched=()):
        """Returns a text: where the run goes on, what was kept and what was not.

        Args:
            engine: The engine that goes on.
            unmatched: Classes of callbacks that no callback of this fit has.
        """
        where = f"epoch {self.epoch + 1}" + (f", step {self.step}" if self.step else "")
        if self.is_validating:
            where = f"the validation of epoch {self.epoch + 1}"
        text = f"Resumed from {self.path}: {where}."
        before, now = self.state["num_replicas"], engine.num_replicas
        if (before, self.state["num_workers"]) != (now, engine.num_workers):
            kept = "weights, optimizers, statistics, metrics, callbacks, history and position"
            text += (
                f" It was written on {before} replica(s) of {self.state['num_workers']} worker(s) "
                f"and goes on with {now} replica(s) of {engine.num_workers} worker(s): {kept} are "
                "kept; each replica's random numbers are derived anew from the same seeds."
            )
        if unmatched:
            text += f" Not restored, for lack of such a callback: {', '.join(unmatched)}."
        return text


def find(directory, engine, raise_together):
    """Returns the newest whole checkpoint, the same one on all workers, or None.

    Args:
        directory: Folder of the run's checkpoints, or one checkpoint.
        engine: The engine whose workers agree; the chief chooses.
        raise_together: Function that raises an error of one worker on all.

    Raises:
        CheckpointError: When all checkpoints are damaged, the one that was asked for is missing,
            or a worker cannot read what the chief has chosen.
    """
    path, error = None, None
    is_chief = engine.worker == 0
    if is_chief:
        path = checkpoints.newest(directory)
        if path is None and (
            checkpoints.is_checkpoint(directory) or checkpoints.complete(directory, verify=False)
        ):
            error = CheckpointError(
                f"No complete checkpoint was found. Received: directory={directory!r}. Give the "
                "folder that kr.callbacks.Checkpoint or trainer.save_checkpoint wrote to."
            )
    raise_together(error)
    path = _as_the_chief(path, directory, engine)
    if path is None:
        return None
    try:
        problem = None if is_chief else checkpoints.damage(path)
        if problem is not None:
            raise CheckpointError(
                f"This worker cannot read the checkpoint {path} that the chief has chosen "
                f"({problem}). The folder must be on a file system that every worker sees."
            )
        found = Resumed(*checkpoints.load(path))
    except (CheckpointError, OSError, tf.errors.OpError) as problem:
        error = problem
    raise_together(error)
    return found


def _as_the_chief(path, directory, engine):
    """Returns the path of the checkpoint that the chief has chosen, or None."""
    if engine.num_workers == 1:
        return path
    step, count = (0, 0) if path is None else checkpoints.parse_name(path)
    chosen = engine.sum_over_workers({"step": float(step), "count": float(count)})
    if not chosen["count"]:
        return None
    if checkpoints.is_checkpoint(directory):
        return os.path.normpath(directory)
    name = checkpoints.make_name(int(chosen["step"]), int(chosen["count"]))
    return os.path.join(directory, name)
