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
    if not current.distributed or current.building:
        return original(variable, value)
    copy = compat.local_copy(variable)
    value = tf.cast(value, copy.dtype)
    if current.rows is not None and not current.applying and compat.is_summed_on_read(variable):
        value = tf.where(current.rows > 0, value, copy)  # no rows, no metric
    copy.assign(conditions.selected(current, value, copy))
    return None


@compat.around("initialize")
def _initialize_outside_of_the_graph(original, variable, value):
    """Variables that a building pass meets are made eagerly, in the strategy's scope."""
    current = replica.current()
    if current is None or not current.building:
        return original(variable, value)
    with tf.init_scope():
        return original(variable, value)
