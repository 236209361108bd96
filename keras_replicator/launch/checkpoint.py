"""`keras-replicator checkpoint show|export`: what a checkpoint holds, and its model as a file."""

import importlib
import os
import sys

from keras_replicator import checkpoints
from keras_replicator.checkpoints import CheckpointError


def show(directory):
    """Returns a text: what the newest checkpoint of a folder holds, and from which plan.

    Args:
        directory: Folder of a run's checkpoints, or one checkpoint.

    Raises:
        CheckpointError: When there is none.
    """
    path, tensors, state = checkpoints.read(directory)
    size = sum(array.nbytes for array in tensors.values())
    place = f"step {state['step']} of epoch {state['epoch'] + 1}"
    if state.get("validating"):
        place = f"the validation of epoch {state['epoch'] + 1}"
    elif not state["step"]:
        place = f"the beginning of epoch {state['epoch'] + 1}"
    if state.get("stopped"):
        place += " (training was stopped by a callback)"
    versions = ", ".join(f"{name} {value}" for name, value in state["versions"].items())
    lines = [
        path,
        f"  written at {place}, after {state['total_steps']} steps, with {versions}",
        f"  {len(tensors)} tensors, {size:,} bytes",
        "  history: " + (_history(state["history"]) or "none"),
        "  callbacks: " + (", ".join(entry["class"] for entry in state["callbacks"]) or "none"),
        *(
            f"  {name} data: {_place(position, bool(checkpoints.read_iterators(path)))}"
            for name, position in state["data"].items()
        ),
        *("  " + line for line in state["plan"].splitlines()),
    ]
    for name in sorted(tensors, key=_by_number):
        variable = state["paths"].get(name, "")
        shape = "x".join(map(str, tensors[name].shape)) or "scalar"
        lines.append(f"  {name}  {tensors[name].dtype} {shape}  {variable}".rstrip())
    return "\n".join(lines)


def export(directory, path, modules=()):
    """Writes the model of the newest checkpoint to a file.

    Args:
        directory: Folder of a run's checkpoints, or one checkpoint.
        path: `….keras`, `….weights.h5`, or a folder for a SavedModel. Of several models, each is
            written to a path with its name before the ending: `gan.generator.keras`.
        modules: Names of modules that define and register custom layers.

    Returns:
        The paths that were written.

    Raises:
        CheckpointError: When the model cannot be made from its config.
    """
    import keras

    source, tensors, state = checkpoints.read(directory)
    if not state.get("model"):
        raise CheckpointError(
            f"The checkpoint {source} holds weights but no model config (a subclassed model "
            "without get_config()). Build the model and call "
            "trainer.restore_checkpoint(directory), then trainer.save(path)."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module in modules:
        importlib.import_module(module)
    try:
        models = {
            name: keras.saving.deserialize_keras_object(config)
            for name, config in state["model"].items()
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The model of the checkpoint {source} cannot be made from its config. Name the "
            "modules that define its layers and register them for serialization: --import "
            f"my_layers. The cause: {error}"
        ) from error
    values = [tensors[f"model/{number}"] for number in range(len(_weights(models)))]
    for variable, value in zip(_weights(models), values):
        variable.assign(value)
    written = []
    for name, model in models.items():
        target = _named(path, name)
        if target.endswith(".weights.h5"):
            model.save_weights(target)
        elif target.endswith(".keras"):
            model.save(target)
        else:
            model.export(target, verbose=False)
        written.append(target)
    return written


def _weights(models):
    """All weights in the order in which the trainer stores them."""
    from keras_replicator.models import ModelGroup

    return (models[""] if "" in models else ModelGroup(models)).weights


def _named(path, name):
    if not name:
        return path
    for ending in (".weights.h5", ".keras"):
        if path.endswith(ending):
            return f"{path.removesuffix(ending)}.{name}{ending}"
    return os.path.join(path, name)


def _history(history):
    ends = {name: values[-1] for name, values in history.items() if values}
    return ", ".join(
        f"{name} {value:.6g}" if isinstance(value, (int, float)) else name
        for name, value in ends.items()
    )


def _place(position, is_saved):
    kind = position["facts"]["the data"]
    if not position["is_open"]:
        return f"{kind}, at the end of an epoch"
    how = "its place saved" if is_saved else "found again by its number"
    return f"{kind}, {position['consumed']} batches into pass {position['pass'] + 1}, {how}"


def _by_number(name):
    return [
        (not part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in name.split("/")
    ]
