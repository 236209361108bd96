"""Where the time of training goes: waiting for batches, and reducing over replicas.

The compiled loop itself looks at the clock, a few operations a step. What counts as waiting is the
time from the end of a step to the arrival of the next batch; as reducing, that from the last
gradient of a replica to the reduced ones, the wait for slower replicas included.
"""

import time

import tensorflow as tf

from keras_replicator import replica

_KEY = "step_times"


class StepTimes:
    """Seconds since `reset`, on this worker.

    Args:
        replicas: Number of this worker's replicas, over which the time of reducing is averaged.
    """

    def __init__(self, replicas):
        self._replicas = replicas
        with tf.init_scope(), tf.device("CPU:0"):
            self._waiting, self._reducing = (
                tf.Variable(0.0, dtype=tf.float64, trainable=False) for _ in range(2)
            )

    @property
    def scratch(self):
        """What makes steps look at the clock: an entry for `Replica.scratch`."""
        return {_KEY: self}

    def reset(self):
        """Starts an epoch."""
        self._waiting.assign(0.0)
        self._reducing.assign(0.0)

    def read(self):
        """Returns the seconds, by name."""
        return {
            "input_wait_seconds": float(self._waiting),
            "reduce_seconds": float(self._reducing),
        }

    def watch(self, step):
        """Wraps a loop's `state = step(done, *state, element)`.

        The wrapped step has one more entry at the front of its state: the time at which the step
        before it had ended, at first that of the start (`tf.timestamp()`).
        """

        def watched(done, free, *state_and_element):
            self._waiting.assign_add(tf.maximum(_time_of(state_and_element[-1]) - free, 0.0))
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            state = step(done, *state_and_element)
            return (time_after_changes(graph, before), *state)

        return watched

    def waiting_for(self, fetch):
        """Calls a function that fetches a batch outside of a compiled loop."""
        started = time.perf_counter()
        element = fetch()
        self._waiting.assign_add(time.perf_counter() - started)
        return element

    def reduce_sum(self, current, tensors):
        """`Replica.reduce_sum`, timed."""
        begun = _time_of(tensors)
        reduced = current.reduce_sum(tensors)
        self._reducing.assign_add((_time_of(reduced) - begun) / self._replicas)
        return reduced


def of(scratch):
    """Returns the `StepTimes` among entries for `Replica.scratch`, or None."""
    return (scratch or {}).get(_KEY)


def reduce_sum(tensors):
    """Adds up a flat list of tensors over replicas; timed, where somebody wants to know."""
    current = replica.current()
    times = of(current.scratch)
    with tf.name_scope("reduce"):
        if times is None or not current.distributed:
            return current.reduce_sum(tensors)
        return times.reduce_sum(current, tensors)


def time_after_changes(graph, before):
    """The time at which everything that was traced since has changed what it changes.

    Args:
        graph: The graph in which it was traced.
        before: How many operations the graph had before.
    """
    changes = [op for op in graph.get_operations()[before:] if op.op_def.is_stateful]
    with tf.control_dependencies(changes):
        return tf.timestamp()


def _time_of(nest):
    """The time at which every tensor of a nest was there."""
    tensors = tf.nest.flatten(nest, expand_composites=True)
    with tf.control_dependencies([tensor for tensor in tensors if tensor is not None]):
        return tf.timestamp()
