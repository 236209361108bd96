"""Inside a step each replica writes its own copy of a variable.

`tf.distribute` lets a replica change a mirrored variable only through a merge of all replicas.
Here the copies are kept equal by construction instead (gradients are reduced before the update,
seeds advance in step, statistics are averaged at the end of the step), so a write is local: it
needs no collective, may stand under a condition, and can be compiled.
"""

import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.steps import conditions


@compat.around("variable_assign")
def _assign_local_copy(original, variable, value):
    current = replica.current()
    if current is None:
        return original(variable, value)
    current.assigned[id(variable)] = variable
    if current.building:
        _bring_into_scope(variable)
        if tf.executing_eagerly():
            return None  # nothing is updated
    if not current.distributed or current.building:
        return original(variable, value)
    copy = compat.local_copy(variable)
    value = tf.cast(value, copy.dtype)
    if current.rows is not None and not current.applying and compat.is_summed_on_read(variable):
        value = tf.where(current.rows > 0, value, copy)  # no rows, no metric
    elif current.total_rows is not None and not current.applying and copy.dtype.is_floating:
        value = tf.where(current.total_rows > 0, value, copy)  # no rows at all, no statistic
    copy.assign(conditions.selected(current, value, copy))
    return None


def _bring_into_scope(variable):
    """A variable that was made outside of the trainer gets a copy for each replica.

    All trainers share the state of Keras' global seed generator, which stays where it is.
    """
    if variable is compat.global_seed_state():
        return
    with tf.init_scope():
        if compat.scope_has_copies() and not compat.is_distributed(variable):
            compat.move_to_scope(variable)


@compat.around("initialize")
def _initialize_outside_of_the_graph(original, variable, value):
    """Variables that a building pass meets are made eagerly, in the strategy's scope."""
    current = replica.current()
    if current is None or not current.building:
        return original(variable, value)
    with tf.init_scope():
        return original(variable, value)


def _add_at_once(original, variable, value, sign):
    """Keras reads, adds and writes; where other workers do so, too, updates would be lost."""
    current = replica.current()
    if current is None or current.building or not current.asynchronous:
        return original(variable, value)
    current.assigned[id(variable)] = variable
    raw = compat.raw_variable(variable)
    value = tf.broadcast_to(tf.cast(value, raw.dtype), raw.shape)
    raw.assign_add(value if sign > 0 else -value, read_value=False)
    return raw.read_value()


@compat.around("variable_assign_add")
def _assign_add_at_once(original, variable, value):
    return _add_at_once(original, variable, value, 1)


@compat.around("variable_assign_sub")
def _assign_sub_at_once(original, variable, value):
    return _add_at_once(original, variable, value, -1)
