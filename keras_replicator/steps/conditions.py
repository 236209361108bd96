"""An update under a condition of a tensor: `tf.cond(step % 2 == 0, apply, nothing)`.

`keras.ops.cond` is the same.

Replicas cannot meet inside of a branch. Where a branch holds an update, both branches are
therefore traced in line: the gradients are always reduced, and only the assignments depend on the
condition. Branches without an update stay what they are, and any other collective in a branch
is an error.
"""

import tensorflow as tf

from keras_replicator import compat, replica


class UpdateInBranch(RuntimeError):
    """An optimizer was applied inside of a branch of `tf.cond`."""


_original_cond = tf.cond


def _cond(pred, true_fn=None, false_fn=None, name=None):
    return _conditional(_original_cond, pred, true_fn, false_fn, name)


@compat.around("keras_cond")
def _keras_cond(original, pred, true_fn, false_fn):
    return _conditional(original, pred, true_fn, false_fn)


def _conditional(original, pred, true_fn, false_fn, *name):
    current = replica.current()
    if current is None or not current.distributed or current.building or tf.executing_eagerly():
        return original(pred, true_fn, false_fn, *name)
    outer = current.branch
    current.branch = True
    try:
        return original(pred, true_fn, false_fn, *name)
    except UpdateInBranch:
        pass
    finally:
        current.branch = outer
    if outer:
        raise UpdateInBranch
    return _both_branches(current, pred, true_fn, false_fn)


def _both_branches(current, pred, true_fn, false_fn):
    results = []
    for taken, function in ((pred, true_fn), (tf.logical_not(pred), false_fn)):
        before = current.condition
        current.condition = taken if before is None else tf.logical_and(before, taken)
        try:
            results.append(function())
        finally:
            current.condition = before
    if results[0] is None:
        return None
    return tf.nest.map_structure(
        lambda true, false: true if true is None else tf.where(pred, true, false), *results
    )


tf.cond = _cond


def check_update(current):
    """Called before an update reduces: inside of a branch it has to be traced in line."""
    if current.branch:
        raise UpdateInBranch


def selected(current, value, old):
    """Returns the value to assign: the old one where the condition does not hold."""
    return value if current.condition is None else tf.where(current.condition, value, old)


def masked(current, value):
    """Returns what to add to a variable: zeros where the condition does not hold."""
    if current.condition is None:
        return value
    if isinstance(value, tf.IndexedSlices):
        kept = tf.where(current.condition, value.values, tf.zeros_like(value.values))
        return tf.IndexedSlices(kept, value.indices, value.dense_shape)
    return tf.where(current.condition, value, tf.zeros_like(value))
