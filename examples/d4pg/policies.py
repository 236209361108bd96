"""Policies as actors run them: NumPy for states, where TensorFlow would cost more than it does."""

import numpy as np


def make_policy(config, spec):
    """Returns the policy of a `Config`: `policy.load(weights)`, then `policy(observation)`.

    Args:
        config: a `Config`.
        spec: the `Spec` of the environment.
    """
    return KerasPolicy(config, spec) if config.pixels else NumpyPolicy()


class NumpyPolicy:
    """The policy of `networks.build_policy` in NumPy."""

    def __init__(self):
        self._weights = None

    def load(self, weights):
        """Takes the weights of the Keras model, in their order."""
        self._weights = weights

    def __call__(self, observation):
        """Returns actions `[..., m]` in -1 to 1 for observations `[..., n]`."""
        kernel, bias, scale, offset, *layers = self._weights
        x = observation @ kernel + bias
        x = x - x.mean(-1, keepdims=True)
        x = np.tanh(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * scale + offset)
        *hidden, kernel, bias = layers
        for number in range(0, len(hidden), 2):
            x = x @ hidden[number] + hidden[number + 1]
            x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))  # ELU
        return np.tanh(x @ kernel + bias)


class KerasPolicy:
    """Torso and policy for images, in Keras.

    Args:
        config: a `Config`.
        spec: the `Spec` of the environment.
    """

    def __init__(self, config, spec):
        # An actor of states never imports TensorFlow.
        import tensorflow as tf

        from d4pg.networks import build_policy, build_torso

        self._torso = build_torso(spec.observation_shape)
        self._policy = build_policy(
            self._torso.output_shape[-1], spec.action_size, config.policy_sizes
        )
        self._act = tf.function(lambda images: self._policy(self._torso(images)))

    def load(self, weights):
        """Takes the weights of torso and policy, in this order."""
        count = len(self._torso.weights)
        self._torso.set_weights(weights[:count])
        self._policy.set_weights(weights[count:])

    def __call__(self, observation):
        """Returns actions `[m]` in -1 to 1 for one observation."""
        return self._act(observation[np.newaxis]).numpy()[0]


def explore(action, noise, random):
    """Adds Gaussian noise to an action and clips it to -1 to 1.

    Args:
        action: `[m]`.
        noise: its standard deviation.
        random: a `numpy.random.Generator`.
    """
    noisy = action + noise * random.standard_normal(np.shape(action))
    return np.clip(noisy, -1.0, 1.0).astype(np.float32)


def run_episode(policy, environment):
    """Runs one episode without noise and returns the sum of its rewards."""
    observation, total, last = environment.reset(), 0.0, False
    while not last:
        observation, reward, _, last = environment.step(policy(observation))
        total += reward
    return total
