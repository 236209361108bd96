"""Who writes which file in a job of several workers.

Only the chief writes shared files. On the other workers Keras' file-writing callbacks are turned
to a folder `worker_<i>/` beside the shared one for the time of a fit, and saving the model does
nothing: every worker holds the same weights.
"""

import contextlib
import os

import keras

from keras_replicator import compat


@contextlib.contextmanager
def worker_files(callbacks, model, plan):
    """Keeps the workers other than the chief away from shared files.

    Args:
        callbacks: What the user passed as callbacks: None, one, a list, or a `CallbackList`.
        model: The Keras model.
        plan: The `Plan`.
    """
    if plan.is_chief:
        if plan.num_workers > 1:
            _make_folders(callbacks)
        yield
        return
    changed = []

    def set_attribute(owner, name, value):
        changed.append((owner, name, getattr(owner, name), name in vars(owner)))
        object.__setattr__(owner, name, value)

    for callback in compat.as_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger):
            set_attribute(callback, "filename", _ensured(beside(callback.filename, plan.worker)))
        elif isinstance(callback, keras.callbacks.TensorBoard):
            set_attribute(callback, "log_dir", os.path.join(callback.log_dir, folder(plan.worker)))
        elif isinstance(callback, keras.callbacks.ModelCheckpoint):
            # It decides as the chief's does. A name without a folder leaves none to be made.
            set_attribute(callback, "filepath", os.path.basename(callback.filepath))
            set_attribute(callback, "verbose", 0)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            # Every worker restores from the shared backup; only the chief writes and deletes it.
            for name in compat.BACKUP_WRITERS:
                set_attribute(callback, name, _nothing)
    for name in ("save", "save_weights", "export"):
        set_attribute(model, name, _nothing)
    try:
        yield
    finally:
        for owner, name, value, own in reversed(changed):
            if own:
                object.__setattr__(owner, name, value)
            else:
                object.__delattr__(owner, name)


def folder(worker):
    """Returns the name of a worker's own folder.

    Example:

    >>> folder(1)
    'worker_1'
    """
    return f"worker_{worker}"


def beside(path, worker):
    """Returns a worker's own path for a shared file.

    Example:

    >>> beside("logs/run.csv", 1)
    'logs/worker_1/run.csv'
    """
    directory, name = os.path.split(os.fspath(path))
    return os.path.join(directory, folder(worker), name)


def _make_folders(callbacks):
    """Makes the folders of `ModelCheckpoint`s, which fails there when another worker is faster."""
    for callback in compat.as_callbacks(callbacks):
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            folder_of_all = os.path.dirname(callback.filepath.partition("{")[0])
            os.makedirs(folder_of_all or os.curdir, exist_ok=True)


def _ensured(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _nothing(*args, **kwargs):
    """Stands in for a method that writes a shared file."""
