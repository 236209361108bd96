"""A distribution of values on fixed atoms (Bellemare et al. 2017, arXiv 1707.06887)."""

import tensorflow as tf


def project(values, probabilities, atoms):
    """Projects a distribution onto evenly spaced atoms; its mean stays, within their range.

    Each value is clipped to the range of the atoms, and gives its probability to the two atoms
    beside it: the weight of atom i for a value z is `clip(1 - |z - atoms[i]| / spacing, 0, 1)`.

    Args:
        values: `[rows, n]`.
        probabilities: `[rows, n]`, those of the values.
        atoms: `[m]`, evenly spaced, rising.

    Returns:
        Probabilities of the atoms, `[rows, m]`.

    Example:

    >>> project([[0.5, 9.0]], [[0.4, 0.6]], [0.0, 1.0, 2.0]).numpy().round(2)
    array([[0.2, 0.2, 0.6]], dtype=float32)
    """
    values, probabilities, atoms = (
        tf.convert_to_tensor(tensor, tf.float32) for tensor in (values, probabilities, atoms)
    )
    count = atoms.shape[0]
    place = (tf.clip_by_value(values, atoms[0], atoms[-1]) - atoms[0]) / (atoms[1] - atoms[0])
    # The atom below; for a value on the last atom the one before it, which then gets nothing.
    below = tf.clip_by_value(tf.floor(place), 0.0, count - 2.0)
    above_share = place - below
    rows = tf.shape(values)[0]
    first = tf.range(rows)[:, tf.newaxis] * count + tf.cast(below, tf.int32)
    masses = [probabilities * (1.0 - above_share), probabilities * above_share]
    sums = tf.math.unsorted_segment_sum(
        tf.concat(masses, axis=1), tf.concat([first, first + 1], axis=1), rows * count
    )
    return tf.reshape(sums, (rows, count))


def mean(probabilities, atoms):
    """Returns the mean `[rows]` of distributions `[rows, m]` on atoms `[m]`."""
    return tf.linalg.matvec(probabilities, atoms)
