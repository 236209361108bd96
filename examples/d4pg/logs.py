"""What TensorBoard shows of a run, every few seconds and at its end."""

import time

import numpy as np
import tensorflow as tf


class Logs:
    """Writes scalars, with the number of updates as step.

    * `actors/`: return (mean, and per actor), steps per second, by how many updates the
      weights that they act with are behind;
    * `learner/`: losses, Q values, updates per second;
    * `replay/`: size, samples per insert;
    * `evaluation/`: return without noise.

    Args:
        folder: folder of the log files, or None to write nothing.
        exchange: an `Exchange`.
        every: seconds.
    """

    def __init__(self, folder, exchange, every=5.0):
        self._writer = tf.summary.create_file_writer(str(folder)) if folder else None
        self._exchange = exchange
        self._every = every
        self._last = self._reading()

    def write(self, learner_logs, now=False):
        """Writes what a learner's update has returned, and the rest, when it is time; or `now`."""
        reading = self._reading()
        seconds = reading[0] - self._last[0]
        if seconds < self._every and not now:
            return
        steps, updates = (new - old for new, old in zip(reading[1:], self._last[1:]))
        self._last = reading
        returns, lags = self._exchange.take_news()
        scalars = {f"learner/{name}": value for name, value in learner_logs.items()}
        scalars["learner/updates_per_second"] = updates / seconds
        scalars["actors/steps_per_second"] = steps / seconds
        scalars["replay/samples_per_insert"] = self._exchange.samples_per_insert()
        scalars["replay/size"] = min(
            self._exchange.counters.inserts, self._exchange.config.capacity
        )
        if lags:
            scalars["actors/updates_behind"] = np.mean(lags)
        if returns:
            scalars["actors/return"] = np.mean([value for _, value in returns])
        for actor in sorted({actor for actor, _ in returns}):
            own = [value for number, value in returns if number == actor]
            scalars[f"actors/return/{actor}"] = np.mean(own)
        self._write(scalars)

    def write_evaluation(self, returns):
        """Writes the returns of episodes without noise."""
        self._write(
            {"evaluation/return": np.mean(returns), "evaluation/smallest_return": np.min(returns)}
        )

    def _write(self, scalars):
        if self._writer is None:
            return
        with self._writer.as_default(step=self._exchange.counters.updates):
            for name, value in scalars.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def _reading(self):
        counters = self._exchange.counters
        return time.monotonic(), counters.inserts, counters.updates
