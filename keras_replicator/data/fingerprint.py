"""Marks of batches, by which workers notice that they read different rows.

Workers that read the same data set and keep their share of each batch lose rows, and use others
twice, when the data set comes in another order on each of them (a shuffle without a common seed,
files read as they come). A mark is computed from what a worker read, before it takes its share; the
workers compare marks when they agree on the next call.

Each part of a batch has a mark of its own: augmentation may change images differently on each
worker, and labels then still show that the rows are the same.
"""

import tensorflow as tf

# A prime below 2**31: products of two marks fit into an int64, a mark into a float64.
_RANGE = 2**31 - 1
# Of a row's numbers so many are looked at, evenly spaced; of a batch so many parts.
_NUMBERS = 16
_PARTS = 8


def marks_of(batch):
    """Returns int64 `[parts]`, a mark for each part of a batch.

    Args:
        batch: A nest of dense, ragged or sparse tensors with a leading axis of rows.
    """
    leaves = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, _TENSORS)]
    return tf.stack([_mark(leaf) for leaf in leaves[:_PARTS]])


def extend(marks, new):
    """Returns the marks of a sequence of batches, extended by those of one more."""
    return tf.math.floormod(marks * 31 + new, _RANGE)


def no_marks(spec):
    """Returns the marks of an empty sequence of elements of a spec."""
    return tf.zeros(spec[2].shape if len(spec) > 2 else [0], tf.int64)


def no_marks_of(batch_spec):
    """Returns the marks of an empty sequence of batches of a spec, as `marks_of` gives them."""
    leaves = [leaf for leaf in tf.nest.flatten(batch_spec) if isinstance(leaf, _SPECS)]
    return tf.zeros([len(leaves[:_PARTS])], tf.int64)


def differ(first, second):
    """Whether two workers have read different rows: no part of their batches is equal.

    Args:
        first: Marks of one worker, a sequence of numbers.
        second: Marks of another.
    """
    return len(first) > 0 and all(a != b for a, b in zip(first, second))


_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def _mark(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        parts = [leaf.flat_values, *leaf.nested_row_splits]
    elif isinstance(leaf, tf.SparseTensor):
        parts = [leaf.values, leaf.indices]
    else:
        parts = [leaf]
    mark = tf.constant(1, tf.int64)
    for part in parts:
        mark = extend(mark, _mark_of_dense(part))
    return mark


def _mark_of_dense(tensor):
    numbers = _integers(tensor)
    rows = tf.shape(numbers)[0]
    numbers = tf.reshape(numbers, tf.stack([rows, tf.size(numbers) // tf.maximum(rows, 1)]))
    step = tf.maximum(tf.shape(numbers)[1] // _NUMBERS, 1)
    numbers = tf.math.floormod(tf.reshape(numbers[:, ::step], [-1]), _RANGE)
    places = tf.math.floormod(tf.range(1, tf.size(numbers) + 1, dtype=tf.int64) * 48_271, _RANGE)
    return tf.math.floormod(
        tf.reduce_sum(tf.math.floormod(numbers * places, _RANGE)) + tf.cast(rows, tf.int64), _RANGE
    )


def _integers(tensor):
    if tensor.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(tensor, _RANGE)
    if tensor.dtype.is_floating:
        return tf.cast(tf.bitcast(tf.cast(tensor, tf.float32), tf.int32), tf.int64)
    if tensor.dtype.is_complex:
        return _integers(tf.math.real(tensor))
    return tf.cast(tensor, tf.int64)
