"""BatchNormalization over replicas, and statistics that every reader sees as one value.

Local statistics: each replica normalises its own rows and updates its own copy of the moving
statistics; at the end of the step the copies become their average, weighted by rows, so that an
empty replica moves nothing. Global statistics (`sync_batch_norm=True`): mean and variance are
taken over the rows of all replicas.
"""

import tensorflow as tf

from keras_replicator import compat, replica


@compat.around("moments")
def _moments_over_replicas(original, layer, inputs, mask):
    current = replica.current()
    if current is None or not (current.sync_batch_norm or layer.synchronized):
        return original(layer, inputs, mask)
    if not current.distributed and not current.building:
        return original(layer, inputs, mask)
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    weights = tf.ones_like(inputs)
    if mask is not None:
        weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        inputs = tf.where(weights > 0, inputs, tf.zeros_like(inputs))
    count, total = replica.all_sum(
        [tf.reduce_sum(weights, axes), tf.reduce_sum(inputs * weights, axes)]
    )
    mean = tf.math.divide_no_nan(total, count)
    shape = [1] * inputs.shape.rank
    shape[layer.axis] = -1
    centred = (inputs - tf.reshape(mean, shape)) * weights
    squares = replica.all_sum(tf.reduce_sum(tf.square(centred), axes))
    return mean, tf.math.divide_no_nan(squares, count)


def average_statistics(model_variables):
    """Averages over replicas what the step has assigned, weighted by rows.

    Args:
        model_variables: The non-trainable variables of the models that the step trains.

    Integers (counters) advance alike on every replica and are left alone.
    """
    current = replica.current()
    if not current.distributed or current.building:
        return
    changed = [
        variable
        for variable in model_variables
        if id(variable) in current.assigned and tf.as_dtype(variable.dtype).is_floating
    ]
    if not changed:
        return
    copies = [compat.local_copy(variable) for variable in changed]
    averages = current.reduce_sum(
        [tf.math.multiply_no_nan(copy.read_value(), current.weight(copy.dtype)) for copy in copies]
    )
    for copy, average in zip(copies, averages):
        if current.total_rows is not None:  # a global batch without rows moves no statistic
            average = tf.where(current.total_rows > 0, average, copy)
        copy.assign(average)
