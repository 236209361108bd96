"""Operations that DTensor cannot carry (TensorFlow 2.21), by others that give the same.

Inside of a step on a mesh only:

* `x[:, None]`, a slice that adds an axis, crashes the process; the axis is added behind the slice;
* `tf.reverse` (`keras.ops.flip`, AUC) becomes a gather of the axis in reverse order;
* `tf.linalg.band_part` (`keras.ops.tril`, causal masks) becomes a mask;
* `tf.one_hot`, which fails where the classes beside it are split, becomes a comparison;
* convolutions and pooling, whose kernels and channels cannot be split, get them whole for the
  moment;
* an embedding that is split by features gives whole features: attention that is split by heads
  behind it cannot be lowered otherwise.
"""

import functools

import keras
import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.engines.mesh_variables import MeshVariable

dtensor = tf.experimental.dtensor


def _instead_of(owner, name):
    """Decorator: `substitute(original, *arguments)` replaces a function inside of such steps."""
    original = getattr(owner, name)

    def install(substitute):
        @functools.wraps(original)
        def chosen(*args, **kwargs):
            current = replica.current()
            if current is None or not current.on_mesh:
                return original(*args, **kwargs)
            return substitute(original, *args, **kwargs)

        setattr(owner, name, chosen)
        return substitute

    return install


@_instead_of(tf.Tensor, "__getitem__")
def _get_item(original, tensor, index, var=None):
    parts = index if isinstance(index, tuple) else (index,)
    if not any(part is None for part in parts):
        return original(tensor, index, var)
    kept = tuple(part for part in parts if part is not None)
    result = original(tensor, kept or (...,), var)
    # Axes of the result, in the order in which the index names them.
    place, unnamed = 0, tensor.shape.rank - sum(part is not ... for part in kept)
    for part in parts:
        if part is None:
            result = tf.expand_dims(result, place)
            place += 1
        elif part is ...:
            place += unnamed
        elif isinstance(part, slice):
            place += 1
    return result


@_instead_of(tf, "reverse")
def _reverse(original, tensor, axis, name=None):
    axes = tf.get_static_value(tf.convert_to_tensor(axis))
    if axes is None:
        return original(tensor, axis, name)
    tensor = tf.convert_to_tensor(tensor)
    for number in axes.ravel().tolist():
        order = list(range(tensor.shape[number] - 1, -1, -1))
        tensor = tf.gather(tensor, order, axis=number, name=name)
    return tensor


@_instead_of(tf.linalg, "band_part")
def _band_part(original, input, num_lower, num_upper, name=None):  # noqa: A002 - TensorFlow's name
    del original
    tensor = tf.convert_to_tensor(input)
    rows, columns = tensor.shape[-2:]
    below = tf.expand_dims(tf.range(rows), 1) - tf.expand_dims(tf.range(columns), 0)
    lower, upper = tf.cast(num_lower, tf.int32), tf.cast(num_upper, tf.int32)
    inside = ((lower < 0) | (below <= lower)) & ((upper < 0) | (-below <= upper))
    return tf.where(inside, tensor, tf.zeros_like(tensor), name=name)


@_instead_of(tf, "one_hot")
def _one_hot(
    original, indices, depth, on_value=None, off_value=None, axis=None, dtype=None, name=None
):
    del original
    indices = tf.convert_to_tensor(indices)
    rank = indices.shape.rank
    place = rank if axis in (None, -1) else axis
    numbers = tf.reshape(tf.cast(tf.range(depth), indices.dtype), [-1] + [1] * (rank - place))
    chosen = tf.equal(tf.expand_dims(indices, place), numbers)
    if on_value is None and off_value is None:
        return tf.cast(chosen, dtype or tf.float32, name=name)
    on, off = 1 if on_value is None else on_value, 0 if off_value is None else off_value
    if dtype is None:
        dtype = tf.convert_to_tensor(off if on_value is None else on).dtype
    return tf.where(chosen, tf.cast(on, dtype), tf.cast(off, dtype), name=name)


def _with_whole_features(original, input, filters, *args, **kwargs):  # noqa: A002
    mesh = replica.current().mesh
    filters = tf.convert_to_tensor(filters)
    whole = dtensor.relayout(filters, dtensor.Layout.replicated(mesh, filters.shape.rank))
    result = original(_rows_split_only(input, mesh), whole, *args, **kwargs)
    return _rows_split_only(result, mesh)


def _rows_split_only(tensor, mesh):
    """Leaves the rows of a tensor as they are split, and puts its other axes together."""
    tensor = tf.convert_to_tensor(tensor)
    others = [dtensor.UNSHARDED] * (tensor.shape.rank - 1)
    return dtensor.relayout(tensor, dtensor.Layout([dtensor.MATCH, *others], mesh))


def _pool_whole_features(original, input, *args, **kwargs):  # noqa: A002
    mesh = replica.current().mesh
    return _rows_split_only(original(_rows_split_only(input, mesh), *args, **kwargs), mesh)


for _name in ("convolution", "conv_transpose", "depthwise_conv2d"):
    _instead_of(tf.nn, _name)(_with_whole_features)
for _name in ("max_pool", "avg_pool"):
    _instead_of(tf.nn, _name)(_pool_whole_features)


@compat.around("call_layer")
def _call(original, layer, *args, **kwargs):
    result = original(layer, *args, **kwargs)
    current = replica.current()
    if current is None or not current.on_mesh or not isinstance(layer, keras.layers.Embedding):
        return result
    whole, mask = _rows_split_only(result, current.mesh), compat.get_mask(result)
    if mask is not None:
        compat.set_mask(whole, mask)
    return whole


@compat.around("overwrite_with_average")
def _overwrite(original, optimizer, trainable_variables):
    """At the end of training, where Keras would assign on the device of each variable."""
    raw = [compat.raw_variable(variable) for variable in trainable_variables]
    if not tf.executing_eagerly() or not all(isinstance(value, MeshVariable) for value in raw):
        original(optimizer, trainable_variables)
        return
    for value, average in zip(raw, compat.moving_averages(optimizer)):
        value.assign(average.numpy())
