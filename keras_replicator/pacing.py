"""How many steps one call of the compiled loop runs.

With "auto", small models get many steps a call so that Python does not hold them back, and every
callback still sees each batch that it asks for. A call takes a fraction of a second, so that
Ctrl-C, progress bars and signals are served.
"""

import time

import keras

from keras_replicator import compat

_TARGET_SECONDS = 0.1
_HOOKS = {
    "train": (
        "on_batch_begin",
        "on_batch_end",
        "on_train_batch_begin",
        "on_train_batch_end",
    ),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}


def batch_interval(callback, phase="train"):
    """Returns how often a callback needs to see a batch.

    Args:
        callback: A Keras callback.
        phase: "train", "test" or "predict".

    Returns:
        None: it does not look at batches. An int: at every so many batches.

    Example:

    >>> batch_interval(keras.callbacks.EarlyStopping()) is None
    True
    >>> batch_interval(keras.callbacks.ModelCheckpoint("a.keras", save_freq=8))
    8
    """
    declared = getattr(callback, "batch_interval", False)
    if declared is None or (isinstance(declared, int) and declared is not False):
        return declared
    for known, rule in _KNOWN.items():
        if isinstance(callback, known) and _keeps_hooks(callback, known, phase):
            return rule(callback) if phase == "train" else None
    return None if _keeps_hooks(callback, keras.callbacks.Callback, phase) else 1


def _keeps_hooks(callback, known, phase):
    """Whether a callback's batch hooks are those of a class of Keras."""
    return all(
        hook not in vars(callback) and getattr(type(callback), hook) is getattr(known, hook)
        for hook in _HOOKS[phase]
    )


def _saves(callback):
    known = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)
    return isinstance(callback, known) or getattr(callback, "saves_when_preempted", False)


def _saving_interval(checkpoint):
    return None if checkpoint.save_freq == "epoch" else int(checkpoint.save_freq)


def _every_batch_or_none(saves_batches):
    """For callbacks that count the calls of their hooks: every batch, or none."""
    return lambda callback: 1 if saves_batches(callback) else None


# What Keras' own callbacks need of batches.
_KNOWN = {
    keras.callbacks.History: lambda callback: None,
    keras.callbacks.ProgbarLogger: lambda callback: None,
    keras.callbacks.ModelCheckpoint: _saving_interval,
    keras.callbacks.BackupAndRestore: _every_batch_or_none(
        lambda callback: callback.save_freq != "epoch"
    ),
    keras.callbacks.TensorBoard: _every_batch_or_none(
        lambda callback: callback.update_freq != "epoch" or compat.profiles_batches(callback)
    ),
}


class Pacing:
    """Chooses the number of steps of each call.

    Args:
        steps_per_execution: An int, or "auto".
        callbacks: The Keras callbacks of this run.
        phase: "train", "test" or "predict".
        clock: Function that returns seconds; for tests.
    """

    def __init__(self, steps_per_execution, callbacks, phase="train", clock=time.perf_counter):
        self._fixed = None if steps_per_execution == "auto" else int(steps_per_execution)
        asked = [(callback, batch_interval(callback, phase)) for callback in callbacks]
        asked = [(callback, interval) for callback, interval in asked if interval is not None]
        self._intervals = [interval for _, interval in asked]
        self._saving = [interval for callback, interval in asked if _saves(callback)]
        self._steps = 1
        self._clock = clock
        self._started = None
        self._calls = 0

    @property
    def least(self):
        """The fewest steps that a call runs."""
        return self._fixed or 1

    @property
    def watched(self):
        """Whether a callback looks at batches."""
        return bool(self._intervals)

    def begin(self, position, remaining=None):
        """Returns how many steps the next call runs.

        Args:
            position: Steps that this run has made so far, over all epochs.
            remaining: Steps left in this epoch, or None where that is not known.
        """
        if self._fixed is not None:
            steps = self._fixed
        else:
            steps = self._steps
            for interval in self._intervals:
                steps = min(steps, interval - position % interval)
        self._started = self._clock()
        return steps if remaining is None else min(steps, remaining)

    def ahead(self, position):
        """Returns how many steps may be under way beyond a position, or None for any number.

        None are at a step after which a callback saves, so that it finds the state of that step.

        Args:
            position: Steps that this run will have made when the call returns.
        """
        if not self._saving:
            return None
        return min(-position % interval for interval in self._saving)

    def end(self, steps):
        """Learns from a call that ran `steps` steps."""
        self._calls += 1
        if self._calls == 1 or steps == 0:
            return  # the first call traces and compiles
        seconds = max(self._clock() - self._started, 1e-6)
        wanted = int(_TARGET_SECONDS * steps / seconds)
        # Grow gently: a single fast call may be luck.
        self._steps = max(1, min(wanted, self._steps * 8))
