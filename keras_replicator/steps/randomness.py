"""Replicas draw different random numbers from one and the same generator state.

A `keras.random.SeedGenerator` keeps its state equal on all replicas (it advances in step), and the
number of the replica is folded into each seed that is drawn. Replica 0 draws what one device
draws, and the state carries over to any number of replicas.
"""

import tensorflow as tf

from keras_replicator import compat, replica

# An odd constant (the golden ratio in 32 bits) spreads consecutive replicas over the seed space.
_SPREAD = 0x9E3779B9


@compat.around("next_seed")
def _fold_in_replica(original, generator, *args, **kwargs):
    seed = original(generator, *args, **kwargs)
    current = replica.current()
    if current is not None and current.building:
        _count_draw(current, generator.state)
    if current is None or not current.distributed or current.building:
        return seed
    offset = tf.cast(tf.cast(current.index, tf.int64) * _SPREAD, seed.dtype)
    return seed + tf.stack([offset, tf.zeros_like(offset)])


def _count_draw(current, state):
    """Notes a draw, and whether it stands in a loop or under a condition."""
    graph = tf.compat.v1.get_default_graph()
    count, nested = current.draws.get(id(state), (0, False))
    current.draws[id(state)] = (count + 1, nested or graph is not current.graph)
