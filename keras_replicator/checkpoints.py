"""Checkpoint folders: written whole or not at all, checked when read, readable without the model.

    directory/
      step-00000400/
        tensors.index, tensors.data-…   TensorFlow's checkpoint format
        iterators.index, …              places in tf.data pipelines, where there are any
        state.json                      epoch, step, history, callbacks, plan
        manifest.json                   format version, number, sizes and checksums; written last

A folder is written under a temporary name and renamed, so that a crash at any moment leaves the
previous checkpoints as they were. A folder whose manifest is missing or does not match its files
is passed over, with a line saying so. The newest checkpoint is the one that was written last,
whatever its step: the manifest counts.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile

import numpy as np
import tensorflow as tf

FORMAT = 2
# The number of the step; `-2`, where the same step has been saved before.
_FOLDER = re.compile(r"^step-(\d+)(?:-(\d+))?$")
# What a crash may leave behind; the next write removes it.
_LEFTOVERS = (".writing-", ".removing-")
# Paths that this process has written, or has found to be whole.
_whole = set()


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or does not fit."""


def write(directory, step, tensors, state, keep=None, iterators=None):
    """Writes one checkpoint atomically.

    Args:
        directory: Folder of the run's checkpoints; made when it does not exist.
        step: Steps made so far, which names the checkpoint.
        tensors: Dict of NumPy arrays by name.
        state: Dict of JSON values.
        keep: How many of the newest checkpoints stay, or None for all.
        iterators: Dict of places in data sets (variant tensors) by name.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: When the disk does not take it; earlier checkpoints stay whole.
    """
    temporary = None
    try:
        prepare(directory)
        temporary = tempfile.mkdtemp(prefix=_LEFTOVERS[0], dir=directory)
        _write_tensors(os.path.join(temporary, "tensors"), tensors)
        if iterators:
            _write_tensors(os.path.join(temporary, "iterators"), iterators)
        _write_json(os.path.join(temporary, "state.json"), state)
        manifest = {"format": FORMAT, "number": _next_number(directory), "files": {}}
        for name in sorted(os.listdir(temporary)):
            path = os.path.join(temporary, name)
            _sync(path)
            size = os.path.getsize(path)
            manifest["files"][name] = {"bytes": size, "sha256": _checksum(path)}
        _write_json(os.path.join(temporary, "manifest.json"), manifest)
        _sync(temporary)
        final = _free_name(directory, step)
        os.rename(temporary, final)
        _sync(directory)
    except (OSError, tf.errors.OpError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise unwritable(directory, error, f"The checkpoint of step {step}") from error
    _prune(directory, final, keep)
    return final


def prepare(directory):
    """Makes the folder of a run's checkpoints, and clears what a crash has left in it.

    Raises:
        OSError: When the folder cannot be made or written.
    """
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        if name.startswith(_LEFTOVERS):
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def check_writable(directory):
    """Finds out before a run whether its checkpoints can be written.

    Raises:
        CheckpointError: When they cannot.
    """
    try:
        prepare(directory)
        os.rmdir(tempfile.mkdtemp(prefix=_LEFTOVERS[0], dir=directory))
    except OSError as error:
        raise unwritable(directory, error) from error


def unwritable(directory, cause, what="A checkpoint"):
    """Returns the error about a folder that takes no checkpoint."""
    return CheckpointError(
        f"{what} could not be written to '{directory}'; earlier checkpoints are unchanged. Free "
        f"space on the disk, or choose a folder that can be written. The cause: {cause}"
    )


def load(path):
    """Reads one checkpoint, which must be whole; returns `(path, tensors, state)`."""
    return path, _read_tensors(path), _read_json(os.path.join(path, "state.json"))


def read(directory):
    """Reads the newest checkpoint that is whole.

    Args:
        directory: Folder of the run's checkpoints, or one checkpoint.

    Returns:
        `(path, tensors, state)`.

    Raises:
        CheckpointError: When there is none.
    """
    path = newest(directory)
    if path is None:
        raise CheckpointError(
            f"No complete checkpoint was found. Received: directory={directory!r}. Give the folder "
            "that kr.callbacks.Checkpoint or trainer.save_checkpoint wrote to."
        )
    return load(path)


def newest(directory):
    """Returns the path of the newest checkpoint that is whole, or None; says what it passes over.

    Args:
        directory: Folder of the run's checkpoints, or one checkpoint.
    """
    candidates = complete(directory, verify=False)
    if is_checkpoint(directory):
        candidates = [os.path.normpath(directory)]
    for path in candidates:
        problem = damage(path)
        if problem is None:
            return path
        print(f"Checkpoint {path} is damaged ({problem}); taking the one before.", file=sys.stderr)
    return None


def is_checkpoint(path):
    """Whether a path has the name of one checkpoint rather than of a run's folder."""
    return bool(_FOLDER.match(os.path.basename(os.path.normpath(path))))


def make_name(step, count=1):
    """Returns the name of a checkpoint's folder: of the step, and how often it was saved.

    Example:

    >>> make_name(400), make_name(400, 2)
    ('step-00000400', 'step-00000400-2')
    """
    return f"step-{step:08d}" + (f"-{count}" if count > 1 else "")


def parse_name(path):
    """Returns `(step, count)` of a checkpoint's folder."""
    step, count = _FOLDER.match(os.path.basename(os.path.normpath(path))).groups()
    return int(step), int(count or 1)


def complete(directory, verify=True):
    """Returns the paths of checkpoints, newest first; with `verify`, whole ones only.

    Those whose manifest cannot be read come first: nobody knows how old they are.
    """
    if not os.path.isdir(directory):
        return []
    paths = [os.path.join(directory, name) for name in os.listdir(directory) if _FOLDER.match(name)]
    paths.sort(key=lambda path: (_number(path), os.path.basename(path)), reverse=True)
    return [path for path in paths if not verify or damage(path) is None]


def damage(path, checksums=True):
    """Returns what is wrong with a checkpoint, or None."""
    manifest = _manifest(path)
    if manifest is None:
        return "manifest.json is missing or cut off"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')} instead of {FORMAT}"
    for name, expected in manifest["files"].items():
        file = os.path.join(path, name)
        if not os.path.exists(file):
            return f"{name} is missing"
        if os.path.getsize(file) != expected["bytes"]:
            return f"{name} has {os.path.getsize(file)} bytes instead of {expected['bytes']}"
        if checksums and _checksum(file) != expected["sha256"]:
            return f"the checksum of {name} does not match"
    return None


def read_iterators(path):
    """Returns `{name: variant tensor}`, the places in data sets that a checkpoint holds."""
    prefix = os.path.join(path, "iterators")
    if not os.path.exists(prefix + ".index"):
        return {}
    names = list(tf.train.load_checkpoint(prefix).get_variable_to_shape_map())
    values = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        dtypes=[tf.variant] * len(names),
    )
    return dict(zip(names, values))


# --------------------------------------------------------------------------------- the folder


def _next_number(directory):
    numbers = [_number(path) for path in complete(directory, verify=False)]
    return 1 + max((number for number in numbers if np.isfinite(number)), default=0)


def _number(path):
    """How many checkpoints were written before this one, as its manifest says."""
    manifest = _manifest(path) or {}
    return manifest.get("number", float("inf"))


def _free_name(directory, step):
    count = 1
    while os.path.lexists(os.path.join(directory, make_name(step, count))):
        count += 1
    return os.path.join(directory, make_name(step, count))


def _prune(directory, final, keep):
    """Removes the older writing of the same step, and what `keep` does not keep."""
    step, _ = parse_name(final)
    _whole.add(final)
    others = [path for path in complete(directory, verify=False) if path != final]
    # Damaged checkpoints help nobody: they are the first to go.
    others.sort(key=_is_whole, reverse=True)
    kept = len(others) if keep is None else keep - 1
    for place, path in enumerate(others):
        if place >= kept or parse_name(path)[0] == step:
            _remove(path)


def _is_whole(path):
    """Whether a checkpoint is whole; adds up once each that this process has not written."""
    if damage(path, checksums=path not in _whole) is not None:
        return False
    _whole.add(path)
    return True


def _remove(path):
    """Removes a folder so that nobody sees half of it."""
    _whole.discard(path)
    aside = os.path.join(os.path.dirname(path), _LEFTOVERS[1] + os.path.basename(path))
    with contextlib.suppress(OSError):
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


# ---------------------------------------------------------------------------------- the files


def _write_tensors(prefix, tensors):
    names = sorted(tensors) or ["empty"]
    values = [tensors.get(name, np.zeros(())) for name in names]
    values = [value if tf.is_tensor(value) else tf.constant(value) for value in values]
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
        )


def _read_tensors(path):
    reader = tf.train.load_checkpoint(os.path.join(path, "tensors"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def _manifest(path):
    try:
        manifest = _read_json(os.path.join(path, "manifest.json"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def _write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _checksum(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _sync(path):
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
