"""`fit(fast_dev_run=True)`: one step of everything, which leaves no files of the run behind."""

import sys

import keras

from keras_replicator import compat

_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


def without_writers(callbacks, say=True):
    """Returns callbacks without those that write a run's files.

    A dev run must not leave a checkpoint from which the real run would resume, nor curves among
    the real ones.

    Args:
        callbacks: What `fit` takes as `callbacks`.
        say: Whether a line on stderr names what was left out.
    """
    listed = compat.as_callbacks(callbacks)
    kept = [callback for callback in listed if not _writes(callback)]
    if say and len(kept) < len(listed):
        names = ", ".join(type(callback).__name__ for callback in listed if _writes(callback))
        print(f"fast_dev_run: one step, without what writes files ({names}).", file=sys.stderr)
    return kept


def _writes(callback):
    return isinstance(callback, _WRITERS) or getattr(callback, "saves_when_preempted", False)
