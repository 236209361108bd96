"""The norm of each update's gradient, for those who want to see it.

It is that of the gradient that one device would have: averaged over replicas, unscaled, not yet
clipped. An epoch's value is the mean over its updates.
"""

import keras
import tensorflow as tf

from keras_replicator import compat, replica

_KEY = "gradient_norms"


class GradientNorms:
    """One mean for each optimizer.

    Args:
        optimizers: Dict of optimizers, by name.
        engine: The engine in whose scope the means are made.
    """

    def __init__(self, optimizers, engine):
        self._engine = engine
        several = len(optimizers) > 1
        with engine.scope():
            self._means = {
                id(optimizer): keras.metrics.Mean(f"gradient_norm_{name}" if several else _KEY[:-1])
                for name, optimizer in optimizers.items()
            }

    @property
    def scratch(self):
        """What makes a step note its norms: an entry for `Replica.scratch`."""
        return {_KEY: self}

    def variables(self):
        """Returns the variables of the means."""
        return [variable for mean in self._means.values() for variable in mean.variables]

    def note(self, optimizer, gradients):
        """Adds the norm of one update."""
        mean = self._means.get(id(optimizer))
        present = [gradient for gradient in gradients if gradient is not None]
        if mean is None or not present:
            return
        norm = tf.linalg.global_norm([tf.cast(_values(g), tf.float32) for g in present])
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            norm /= tf.cast(compat.local_copy(optimizer.dynamic_scale), tf.float32)
        counts = tf.math.is_finite(norm)  # a float16 update that overflows is skipped
        mean.update_state(tf.where(counts, norm, 0.0), tf.cast(counts, tf.float32))

    def reset(self):
        """Starts an epoch."""
        with self._engine.cross_replica():
            for mean in self._means.values():
                mean.reset_state()

    def read(self):
        """Returns `{name: norm}`, the means since `reset`."""
        return {mean.name: float(self._engine.read(mean.result)) for mean in self._means.values()}


def variables_of(scratch):
    """Returns the variables in which a step with this `Replica.scratch` notes norms."""
    return scratch[_KEY].variables() if _KEY in scratch else []


def note(optimizer, gradients):
    """Called with the gradient of every update."""
    norms = replica.current().scratch.get(_KEY)
    if norms is not None:
        norms.note(optimizer, gradients)


def _values(gradient):
    """The entries of a gradient; rows of an embedding that were looked up twice are added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, where = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
