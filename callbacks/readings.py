"""Numbers that callbacks read from a model, its optimizers and this machine."""

import keras
import tensorflow as tf


def optimizers_of(model):
    """Returns `{suffix: optimizer}` of the model that is being trained.

    Args:
        model: what a callback sees as `self.model`.

    Returns:
        A dict. One optimizer has the suffix `""`; several have their own names as suffixes.
    """
    found = [
        getattr(model, "optimizer", None),
        *(getattr(model, "replicated_optimizers", None) or []),
    ]
    unique = {
        id(optimizer): optimizer
        for optimizer in found
        if isinstance(optimizer, keras.optimizers.Optimizer)
    }
    if len(unique) == 1:
        return {"": next(iter(unique.values()))}
    names = {}
    for optimizer in unique.values():
        name = optimizer.name
        while name in names:
            name += "_"
        names[name] = optimizer
    return names


def learning_rates(model):
    """Returns `{"learning_rate": value}`, or one `learning_rate_<name>` per optimizer."""
    return {
        _join("learning_rate", suffix): float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        for suffix, optimizer in optimizers_of(model).items()
    }


def loss_scales(model):
    """Returns the current scale of every optimizer that scales its loss (float16)."""
    return {
        _join("loss_scale", suffix): float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        for suffix, optimizer in optimizers_of(model).items()
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    }


def memory():
    """Returns memory in use, in bytes: `host_memory`, and `device_memory` with accelerators.

    Returns:
        A dict. `host_memory` is the resident memory of this process, left out where the system
        does not tell; `device_memory` is the largest value over this process's GPUs.
    """
    values = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            resident = next(line for line in status if line.startswith("VmRSS:"))
        values["host_memory"] = 1024.0 * int(resident.split()[1])
    except (OSError, StopIteration):
        pass  # not Linux
    on_devices = [
        tf.config.experimental.get_memory_info(f"GPU:{number}")["current"]
        for number in range(len(tf.config.list_logical_devices("GPU")))
    ]
    if on_devices:
        values["device_memory"] = float(max(on_devices))
    return values


def _join(name, suffix):
    return f"{name}_{suffix}" if suffix else name
