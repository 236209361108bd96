"""What a custom step returns, reduced over replicas and steps.

a keras.metrics.Metric, or its result()   the metric's exact global result
a tensor with one entry per row           the mean over all rows
a scalar                                  averaged over replicas and steps, weighted by rows
kr.replica.Sum(x)                         added up over replicas and steps
"""

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import replica


class StepLogs:
    """Accumulates the logs of steps in variables that live outside of every strategy.

    `reduce_locally` runs on each replica, `add` once per step across replicas, `read` and `reset`
    between calls of the compiled loop.
    """

    def __init__(self):
        self.metrics = {}  # name -> keras.metrics.Metric
        self._totals = {}  # name -> variable of shape [2]: sum, weight
        self.order = []
        self._restored = {}

    def reduce_locally(self, logs):
        """Splits a step's logs into metrics (remembered) and sums (returned).

        Args:
            logs: What the step returned for this replica.

        Returns:
            Dict of float64 tensors of shape [2]: this replica's sum and weight.

        Raises:
            TypeError: When the step returned no dict.
        """
        if logs is None:
            logs = {}
        if not isinstance(logs, dict):
            raise TypeError(
                "A step must return a dict of logs (it may be empty), such as {'loss': loss}. "
                f"Received: {logs!r} of type {type(logs).__name__}"
            )
        current = replica.current()
        logs = _flat(logs)
        sums = {}
        self.order = list(logs)
        for name, value in logs.items():
            tagged = current.results.get(id(value))
            if tagged is not None and tagged[0] is value:
                value = tagged[1]
            if isinstance(value, keras.metrics.Metric):
                self.metrics[name] = value
            else:
                sums[name] = _sum_and_weight(name, value, current)
        return sums

    def add(self, sums):
        """Adds the sums of one step, already added up over the replicas of this worker."""
        for name, value in sums.items():
            if name not in self._totals:
                with tf.init_scope(), tf.device("CPU:0"):
                    start = self._restored.get(name, np.zeros(2))
                    self._totals[name] = tf.Variable(
                        start, dtype=tf.float64, trainable=False, name=f"log_{name}"
                    )
            self._totals[name].assign_add(value)

    def reset(self):
        """Forgets what was added up, metrics that belong to no model included."""
        for metric in self.metrics.values():
            metric.reset_state()
        self._restored = {}
        for total in self._totals.values():
            total.assign(tf.zeros((2,), tf.float64))

    def restore(self, totals, is_chief):
        """Goes on from totals of all workers, which the chief then holds alone."""
        self._restored = totals if is_chief else {}
        for name, total in self._totals.items():
            total.assign(self._restored.get(name, np.zeros(2)))

    def totals(self):
        """Returns `{name: array [sum, weight]}` of this worker."""
        return {name: total.numpy() for name, total in self._totals.items()}

    def values(self, totals, metric_results):
        """Returns `{name: value}` in the order in which the step returned them.

        Args:
            totals: What `totals` returned, added up over workers.
            metric_results: `{name: result}` of `self.metrics`.
        """
        values = {}
        for name in self.order:
            if name in self.metrics:
                values[name] = metric_results[name]
            elif name in totals:
                total, weight = totals[name]
                with np.errstate(invalid="ignore", divide="ignore"):
                    values[name] = np.float64(total) / weight if weight >= 0 else float(total)
        return values


def _flat(logs):
    """Returns logs without nested dicts, as Keras flattens them."""
    flat = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _numbers(name, value):
    """Returns a log as float64."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError):
        tensor = None
    if tensor is None or not (
        tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool
    ):
        raise TypeError(
            f"The log '{name}' is no number. A step returns metrics, scalars, tensors with one "
            f"entry per row, or kr.replica.Sum(x). Received: {name}={value!r}"
        )
    return tf.cast(tensor, tf.float64)


def _sum_and_weight(name, value, current):
    """Returns [sum, weight]; a weight of -1 marks values that are added up."""
    if isinstance(value, replica.Sum):
        total = current.own(tf.reduce_sum(_numbers(name, value.value)))
        # A negative weight never cancels: totals of weights only add up.
        return tf.stack([total, tf.constant(-1.0, tf.float64)])
    value = _numbers(name, value)
    rows = (
        tf.constant(1.0, tf.float64) if current.rows is None else tf.cast(current.rows, tf.float64)
    )
    if value.shape.rank == 0:
        total = tf.math.multiply_no_nan(value, rows)
    else:
        per_row = tf.reduce_mean(value, axis=list(range(1, value.shape.rank)))
        total = current.own(tf.reduce_sum(per_row))
        rows = current.own(tf.cast(tf.size(per_row), tf.float64))
    return tf.stack([total, rows])
