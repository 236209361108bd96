"""The outputs of many calls, joined to arrays of exactly the rows that went in."""

import numpy as np
import tensorflow as tf


def join_outputs(parts):
    """Concatenates nests of outputs along their rows.

    Args:
        parts: A list of nests of tensors; None stays None, ragged and sparse tensors stay so.

    Returns:
        One nest of NumPy arrays.

    Raises:
        ValueError: When there are no parts.
    """
    if not parts:
        raise ValueError("The data hold no batches, so there is nothing to predict.")
    return tf.nest.map_structure(_join, *parts)


def _join(*leaves):
    if leaves[0] is None:
        return None
    if isinstance(leaves[0], tf.RaggedTensor):
        return tf.concat(leaves, 0)
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    arrays = [np.asarray(leaf) for leaf in leaves]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)
