"""Layers that stay on a logical device of their replica, forward and backward.

A layer that is called under `kr.replica.logical_device(i)` while its model is built is pinned: when
a step calls it, its operations run on device i, and their gradients where they ran themselves.
"""

import contextlib
import re
import weakref

import tensorflow as tf

from keras_replicator import compat, placement, replica

_pinned = weakref.WeakKeyDictionary()  # layer -> number of its logical device


def copy_pins(layers, copies):
    """Pins the layers of a copied model as those of the original."""
    for layer, copy in zip(layers, copies):
        if layer in _pinned:
            _pinned[copy] = _pinned[layer]


@compat.around("call_layer")
def _call(original, layer, *args, **kwargs):
    current, index = replica.current(), replica.building_on()
    if index is not None:
        _pinned.setdefault(layer, index)
        result = original(layer, *args, **kwargs)
        for variable in layer.variables:  # Keras may give them their values later
            placement.pin(variable, index)
        return result
    if current is not None and current.devices and not current.building and layer in _pinned:
        with replica.logical_device(_pinned[layer]):
            return original(layer, *args, **kwargs)
    return original(layer, *args, **kwargs)


def _where_it_ran(scope):
    """Context of the gradient of an operation that was made in a name scope."""
    current = replica.current()
    if current is None or not current.devices:
        return contextlib.nullcontext()
    found = re.findall(r"logical_device_(\d+)", scope or "")
    return tf.device(current.devices[int(found[-1])]) if found else contextlib.nullcontext()


compat.place_gradients(_where_it_ran)
