"""Where new Keras variables are made: in the scope of an engine that places them itself.

    with placing(place):                  # place(variable, value, like) sets the variable's value
        model = build()

`value` is a tensor, or a function that makes it. `like` is the variable whose axes a new one shares
(an optimizer's slot, an accumulated gradient), `OWN` for what an optimizer makes in a shape of its
own, or None.
"""

import contextlib
import threading

import tensorflow as tf

from keras_replicator import compat

OWN = object()


class _Thread(threading.local):
    place = None
    like = None


_thread = _Thread()


@contextlib.contextmanager
def placing(place):
    """Context: each new Keras variable is handed to `place(variable, value, like)`.

    Args:
        place: The function, or None for plain variables.
    """
    before, _thread.place = _thread.place, place
    try:
        yield
    finally:
        _thread.place = before


@contextlib.contextmanager
def like(reference):
    """Context: new variables share the axes of `reference`."""
    before, _thread.like = _thread.like, reference
    try:
        yield
    finally:
        _thread.like = before


@compat.around("initialize")
def _initialize(original, variable, value):
    place = _thread.place
    if place is None:
        original(variable, value)
        return
    with tf.init_scope(), placing(None):
        place(variable, value, _thread.like)


def pin(variable, index):
    """Notes the logical device on which a variable is to be made, unless it is noted already."""
    vars(variable).setdefault("_logical_device", index)


def pinned_to(variable):
    """Returns what `pin` has noted, or None."""
    return vars(variable).get("_logical_device")


def make(variable, value):
    """Gives a variable its value as Keras does, inside of a function that places variables."""
    compat.initialize(variable, value)


@compat.around("optimizer_add_variable")
def _add_variable(original, optimizer, *args, **kwargs):
    with like(OWN if _thread.like is None else _thread.like):
        return original(optimizer, *args, **kwargs)


@compat.around("optimizer_add_like")
def _add_like(original, optimizer, reference_variable, *args, **kwargs):
    with like(reference_variable):
        return original(optimizer, reference_variable, *args, **kwargs)
