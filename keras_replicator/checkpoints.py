"""Checkpoint folders: written whole or not at all, checked when read, readable without the model.

    directory/
      step-00000400/
        tensors.index, tensors.data-…   TensorFlow's checkpoint format
        state.json                      epoch, step, history, callbacks, plan
        manifest.json                   format version, sizes and checksums; written last

A folder is written under a temporary name and renamed, so that a crash at any moment leaves the
previous checkpoints as they were. A folder whose manifest is missing or does not match its files
is passed over, with a line saying so.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile

import numpy as np
import tensorflow as tf

FORMAT = 1
_FOLDER = re.compile(r"^step-(\d+)$")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or does not fit."""


def write(directory, step, tensors, state, keep=None):
    """Writes one checkpoint atomically.

    Args:
        directory: Folder of the run's checkpoints; made when it does not exist.
        step: Steps made so far, which names the checkpoint.
        tensors: Dict of NumPy arrays by name.
        state: Dict of JSON values.
        keep: How many of the newest checkpoints stay, or None for all.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: When the disk does not take it; earlier checkpoints stay whole.
    """
    final = os.path.join(directory, f"step-{step:08d}")
    temporary = None
    try:
        os.makedirs(directory, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".writing-", dir=directory)
        _write_tensors(os.path.join(temporary, "tensors"), tensors)
        _write_json(os.path.join(temporary, "state.json"), state)
        files = {
            name: {"bytes": os.path.getsize(path), "sha256": _checksum(path)}
            for name in sorted(os.listdir(temporary))
            for path in [os.path.join(temporary, name)]
        }
        _write_json(os.path.join(temporary, "manifest.json"), {"format": FORMAT, "files": files})
        if os.path.isdir(final):
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync_folder(directory)
    except (OSError, tf.errors.OpError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint of step {step} could not be written to '{directory}'; earlier "
            "checkpoints are unchanged. Free space on the disk, or choose a folder that can be "
            f"written. The cause: {error}"
        ) from error
    if keep is not None:
        for path in complete(directory, verify=False)[keep:]:
            shutil.rmtree(path, ignore_errors=True)
    return final


def read(directory):
    """Reads the newest checkpoint that is whole.

    Args:
        directory: Folder of the run's checkpoints, or one checkpoint.

    Returns:
        `(path, tensors, state)`.

    Raises:
        CheckpointError: When there is none.
    """
    if _FOLDER.match(os.path.basename(os.path.normpath(directory))):
        candidates = [directory]
    else:
        candidates = complete(directory, verify=False)
    for path in candidates:
        problem = damage(path)
        if problem is None:
            return path, _read_tensors(path), _read_json(os.path.join(path, "state.json"))
        print(f"Checkpoint {path} is damaged ({problem}); taking the one before.", file=sys.stderr)
    raise CheckpointError(
        f"No complete checkpoint was found. Received: directory={directory!r}. Give the folder "
        "that kr.callbacks.Checkpoint or trainer.save_checkpoint wrote to."
    )


def exists(directory):
    """Whether a folder holds a complete checkpoint."""
    return bool(complete(directory))


def complete(directory, verify=True):
    """Returns the paths of checkpoints, newest first; with `verify`, whole ones only."""
    if not os.path.isdir(directory):
        return []
    names = sorted((name for name in os.listdir(directory) if _FOLDER.match(name)), reverse=True)
    paths = [os.path.join(directory, name) for name in names]
    return [path for path in paths if not verify or damage(path) is None]


def damage(path):
    """Returns what is wrong with a checkpoint, or None."""
    try:
        manifest = _read_json(os.path.join(path, "manifest.json"))
    except (OSError, ValueError):
        return "manifest.json is missing or cut off"
    if manifest.get("format") != FORMAT:
        return f"format {manifest.get('format')} instead of {FORMAT}"
    for name, expected in manifest["files"].items():
        file = os.path.join(path, name)
        if not os.path.exists(file):
            return f"{name} is missing"
        if os.path.getsize(file) != expected["bytes"]:
            return f"{name} has {os.path.getsize(file)} bytes instead of {expected['bytes']}"
        if _checksum(file) != expected["sha256"]:
            return f"the checksum of {name} does not match"
    return None


def show(directory):
    """Returns a text: what the newest checkpoint of a folder holds, and from which plan."""
    path, tensors, state = read(directory)
    size = sum(array.nbytes for array in tensors.values())
    lines = [
        path,
        f"  epoch {state['epoch']}, step {state['step']}, {state['total_steps']} steps in all",
        f"  {len(tensors)} tensors, {size:,} bytes",
        "  history: " + (", ".join(state["history"]) or "none"),
        "  callbacks: " + (", ".join(entry["class"] for entry in state["callbacks"]) or "none"),
        *("  " + line for line in state["plan"].splitlines()),
    ]
    lines += [f"  {name}  {tensors[name].shape} {tensors[name].dtype}" for name in sorted(tensors)]
    return "\n".join(lines)


def export(directory, path):
    """Writes the model of the newest checkpoint as a `.keras` file.

    Raises:
        CheckpointError: When the model has no config to be made from.
    """
    import keras

    source, tensors, state = read(directory)
    if not state.get("model"):
        raise CheckpointError(
            f"The checkpoint {source} holds weights but no model config (a subclassed model "
            "without get_config(), or several models). Build the model and call "
            "trainer.restore_checkpoint(directory), then trainer.save(path)."
        )
    model = keras.saving.deserialize_keras_object(state["model"])
    for number, variable in enumerate(model.weights):
        variable.assign(tensors[f"model/{number}"])
    model.save(path)


def _write_tensors(prefix, tensors):
    names = sorted(tensors) or ["empty"]
    values = [tf.constant(tensors.get(name, np.zeros(()))) for name in names]
    tf.raw_ops.SaveV2(
        prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
    )


def _read_tensors(path):
    reader = tf.train.load_checkpoint(os.path.join(path, "tensors"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


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


def _sync_folder(directory):
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
