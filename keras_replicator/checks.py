"""Preconditions of arguments, each with the error that names the fix."""

import numpy as np


def check_positive(name, value):
    """Raises `ValueError` unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1. Received: {name}={value!r}")


def check_step(name, step):
    """Raises unless a custom step is None or a plain function."""
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"`{name}` must be a function fn(model, batch). Received: {name}={step!r}")
    if hasattr(step, "get_concrete_function"):
        raise ValueError(
            f"`{name}` is decorated with @tf.function, inside of which replicas cannot talk to "
            f"each other. Remove the decorator: the trainer compiles the step. Received: {step!r}"
        )
