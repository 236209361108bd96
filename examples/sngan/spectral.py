"""Spectral normalisation (Miyato et al. 2018, arXiv 1802.05957)."""

import keras

EPSILON = 1e-12


class SpectralNormalization(keras.layers.Wrapper):
    """Divides a layer's weight by an estimate of its largest singular value.

    The weight, reshaped to a matrix W, is used as W / sigma with sigma = u W v. One step of power
    iteration per call refines u and v from the u of the last training call (section 2.1,
    algorithm 1). The gradient flows through W in sigma, while u and v count as constants, as
    published. (`keras.layers.SpectralNormalization` overwrites the weight instead, and its
    gradient knows nothing of sigma.)

    Example:

    >>> layer = SpectralNormalization(keras.layers.Dense(4))
    >>> layer(keras.ops.ones((2, 3)), training=True).shape
    TensorShape([2, 4])

    Args:
        layer: a `Dense`, `Conv2D` or `Embedding` layer.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def build(self, input_shape=None):
        super().build(input_shape)
        self.u = self.add_weight(
            shape=(1, self.weight.shape[-1]),
            initializer="random_normal",
            trainable=False,
            name="u",
        )

    @property
    def weight(self):
        """The variable of the wrapped layer that is normalised."""
        if isinstance(self.layer, keras.layers.Embedding):
            return self.layer.embeddings
        return self.layer.kernel

    def call(self, inputs, training=False):
        weight = keras.ops.convert_to_tensor(self.weight)
        sigma, u = largest_singular_value(weight, keras.ops.convert_to_tensor(self.u))
        if training:
            self.u.assign(u)
        # The wrapped layer computes with the normalised weight in place of its variable.
        with keras.StatelessScope([(self.weight, weight / sigma)], initialize_variables=False):
            return self.layer(inputs)


def largest_singular_value(weight, u):
    """Refines `u` by one power iteration and estimates the largest singular value.

    Args:
        weight: tensor `[..., out]`, seen as a matrix with `out` columns.
        u: tensor `[1, out]`.

    Returns:
        `(sigma, u)`: a scalar whose gradient takes u and v as constants, and the refined u.
    """
    matrix = keras.ops.reshape(weight, (-1, weight.shape[-1]))
    fixed = keras.ops.stop_gradient(matrix)
    v = _normalize(keras.ops.matmul(u, keras.ops.transpose(fixed)))
    u = _normalize(keras.ops.matmul(v, fixed))
    sigma = keras.ops.sum(keras.ops.matmul(v, matrix) * u)
    return sigma, u


def _normalize(vector):
    return vector / (keras.ops.norm(vector) + EPSILON)
