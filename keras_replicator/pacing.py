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
# Callbacks that merely display what they are given.
_PASSIVE = (keras.callbacks.History, keras.callbacks.ProgbarLogger)


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
    if isinstance(callback, _PASSIVE):
        return None
    declared = getattr(callback, "batch_interval", False)
    if declared is None or (isinstance(declared, int) and declared is not False):
        return declared
    frequency = getattr(callback, "save_freq", None)
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return None if frequency == "epoch" or phase != "train" else int(frequency)
    if isinstance(callback, keras.callbacks.TensorBoard) and _keeps_batch_hooks(callback):
        if phase != "train":
            return None
        # It counts the calls of its hooks, so it sees every batch or none.
        quiet = callback.update_freq == "epoch" and not compat.profiles_batches(callback)
        return None if quiet else 1
    base = keras.callbacks.Callback
    for hook in _HOOKS[phase]:
        if hook in vars(callback) or getattr(type(callback), hook) is not getattr(base, hook):
            return 1
    return None


def _keeps_batch_hooks(callback):
    """Whether a subclass of Keras' TensorBoard leaves its batch hooks alone."""
    return all(
        getattr(type(callback), hook) is getattr(keras.callbacks.TensorBoard, hook)
        for hook in _HOOKS["train"]
    )


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
        self._intervals = [
            interval
            for interval in (batch_interval(callback, phase) for callback in callbacks)
            if interval is not None
        ]
        self._steps = 1
        self._clock = clock
        self._started = None
        self._calls = 0

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

    def end(self, steps):
        """Learns from a call that ran `steps` steps."""
        self._calls += 1
        if self._calls == 1 or steps == 0:
            return  # the first call traces and compiles
        seconds = max(self._clock() - self._started, 1e-6)
        wanted = int(_TARGET_SECONDS * steps / seconds)
        # Grow gently: a single fast call may be luck.
        self._steps = max(1, min(wanted, self._steps * 8))
