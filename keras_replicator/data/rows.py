"""Slicing rows out of nests of dense, ragged and sparse tensors."""

import tensorflow as tf


def count_rows(nest):
    """Returns the rows of a batch as an int32 scalar, read off its first leaf."""
    for leaf in tf.nest.flatten(nest):
        if leaf is None or is_optional(leaf):
            continue
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        leaf = tf.convert_to_tensor(leaf)
        if leaf.shape.rank == 0:
            raise ValueError(
                "A batch must have a leading axis of rows. Batch the data set by the global batch "
                f"size: `dataset.batch(batch_size)`. Received: an element with the leaf {leaf}"
            )
        return tf.shape(leaf)[0]
    raise ValueError(f"A batch must hold at least one tensor. Received: {nest}")


def with_static_rows(rows, batch):
    """Returns the rows of a whole batch as a constant, where shapes tell them already.

    What is computed from them is then known while a step is traced.
    """
    for leaf in tf.nest.flatten(batch):
        if leaf is None or is_optional(leaf):
            continue
        is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
        return rows if not is_dense or leaf.shape[0] is None else tf.constant(leaf.shape[0])
    return rows


def check_equal_rows(inputs):
    """Raises `ValueError` unless every dense leaf of the inputs of `run` has as many rows."""
    rows = set()
    for leaf in tf.nest.flatten(inputs):
        if not isinstance(leaf, tf.Tensor):
            continue
        if leaf.shape.rank == 0:
            raise ValueError(
                "trainer.run splits its inputs by row, and a scalar has none. Give every replica "
                f"the value: kr.PerReplica([value] * trainer.num_replicas). Received: {leaf}"
            )
        rows.add(leaf.shape[0])
    if len(rows) > 1:
        raise ValueError(
            "The inputs of trainer.run are split by row, and must have equally many. "
            f"Received: inputs with {', '.join(map(str, sorted(rows)))} rows"
        )


def slice_rows(nest, begin, end):
    """Returns the rows `begin:end` of every leaf."""

    def take(leaf):
        if leaf is None or is_optional(leaf):
            return None
        if isinstance(leaf, tf.SparseTensor):
            rank = leaf.dense_shape.shape[0]
            start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros(rank - 1, tf.int64)], 0)
            size = tf.concat([[tf.cast(end - begin, tf.int64)], leaf.dense_shape[1:]], 0)
            part = tf.sparse.slice(leaf, start, size)
            # tf.sparse.slice forgets the static shape, which layers need.
            return tf.SparseTensor(
                part.indices, part.values, tf.ensure_shape(part.dense_shape, [rank])
            )
        return leaf[begin:end]

    return tf.nest.map_structure(take, nest)


def at_least_one(begin, end, total):
    """Widens an empty range of rows to one row, where there is any."""
    begin = tf.minimum(begin, tf.maximum(total - 1, 0))
    return begin, tf.minimum(tf.maximum(end, begin + 1), total)


def drop_optionals(nest):
    """Replaces what stands for None in a `tf.data` element by None."""
    return tf.nest.map_structure(lambda leaf: None if is_optional(leaf) else leaf, nest)


def is_optional(leaf):
    """Whether a leaf of a data set is a `tf.experimental.Optional`, as Keras writes None."""
    return isinstance(leaf, tf.experimental.Optional)
