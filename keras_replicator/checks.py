"""Preconditions of arguments, each with the error that names the fix."""

import inspect
import numbers

import keras
import numpy as np
import tensorflow as tf


def check_positive(name, value):
    """Raises `ValueError` unless `value` is an int of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1. Received: {name}={value!r}")


def check_count(name, value):
    """Raises `ValueError` unless `value` is an int of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"`{name}` must be an int of at least 0. Received: {name}={value!r}")


def check_seconds(name, value):
    """Raises `ValueError` unless `value` is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value <= 0:
        raise ValueError(
            f"`{name}` must be a number of seconds above 0. Received: {name}={value!r}"
        )


def check_flag(name, value):
    """Raises `ValueError` unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"`{name}` must be True or False. Received: {name}={value!r}")


def check_eager(method):
    """Raises `RuntimeError` inside of a `tf.function`."""
    if tf.inside_function():
        raise RuntimeError(
            f"trainer.{method}() was called inside of a tf.function. Call it from Python: the "
            f"trainer compiles its steps. Received: {method}() while a graph is traced"
        )


def check_input(name, value):
    """Raises `ValueError` where there are no data."""
    if all(leaf is None for leaf in keras.tree.flatten(value)):
        raise ValueError(
            f"`{name}` holds no data. Pass arrays, a tf.data.Dataset, a keras.utils.PyDataset or a "
            f"generator. Received: {name}={value!r}"
        )


def check_fit(
    epochs, initial_epoch, verbose, callbacks, validation_split, validation_freq, shuffle
):
    """Raises where an argument of `fit` cannot mean anything."""
    check_count("epochs", epochs)
    check_count("initial_epoch", initial_epoch)
    if isinstance(verbose, str) and verbose != "auto":
        raise ValueError(f"`verbose` must be 'auto', 0, 1 or 2. Received: verbose={verbose!r}")
    for callback in callbacks:
        if not hasattr(callback, "set_model"):
            raise TypeError(
                "`callbacks` must be a list of keras.callbacks.Callback objects. "
                f"Received: callbacks=[{callback!r}, …]"
            )
    if not 0 <= validation_split < 1:
        raise ValueError(
            "`validation_split` is the part of the rows that is held back, from 0 to below 1. "
            f"Received: validation_split={validation_split!r}"
        )
    if isinstance(validation_freq, numbers.Number):
        check_positive("validation_freq", validation_freq)
    if isinstance(shuffle, str) and shuffle != "batch":
        raise ValueError(f"`shuffle` must be True, False or 'batch'. Received: shuffle={shuffle!r}")


def check_class_weight(class_weight):
    """Raises `TypeError` unless class weights are None or a dict."""
    if class_weight is not None and not isinstance(class_weight, dict):
        raise TypeError(
            "`class_weight` must be a dict from class numbers to weights, such as {0: 1.0, 1: 3.0}."
            f" Received: class_weight={class_weight!r}"
        )


def check_callable(name, function, arguments, example):
    """Raises `TypeError` unless a function takes so many arguments by position."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        raise TypeError(
            f"`{name}` is called as {example}, and does not take that: {error}. "
            f"Received: {name}={function!r}"
        ) from error
    except ValueError:
        return  # a callable without a signature


def check_step(name, step):
    """Raises unless a custom step is None or a plain function of a model and a batch."""
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"`{name}` must be a function fn(model, batch). Received: {name}={step!r}")
    if hasattr(step, "get_concrete_function"):
        raise ValueError(
            f"`{name}` is decorated with @tf.function, inside of which replicas cannot talk to "
            f"each other. Remove the decorator: the trainer compiles the step. Received: {step!r}"
        )
    check_callable(name, step, 2, "fn(model, batch)")
