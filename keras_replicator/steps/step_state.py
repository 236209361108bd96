"""What each step of an asynchronous run has for itself: counters, seeds and metric states.

Several workers that read and write one variable lose updates of each other. So while a step runs,
what counts is a variable of its worker: it begins with a value that the chief hands out with the
step (the number of the update, the place in the random stream) or with zero (metric states), and
what the step has added to it goes back to the chief, who adds up each finished step once.

    state = StepState(counters, seeds, metrics)
    with state.in_step(starts):            # while a function is traced
        ...
        added = state.added(starts)
"""

import contextlib

import numpy as np
import tensorflow as tf

from keras_replicator import compat

# Random draws in loops or under conditions are counted once while tracing: leave room for them.
_ROOM_IN_LOOPS = 1 << 16


class StepState:
    """The variables of which a step has a copy.

    Args:
        counters: List of (Keras variable, how far an update advances it).
        seeds: List of (Keras variable, draws a batch).
        metrics: List of Keras variables that begin with zero in each step.
    """

    def __init__(self, counters=(), seeds=(), metrics=()):
        self.counters = [variable for variable, _ in counters]
        self._updates = np.array([count for _, count in counters], np.int64)
        self.seeds = [variable for variable, _ in seeds]
        self._draws = np.array([count for _, count in seeds], np.int64)
        self.metrics = list(metrics)
        self._sizes = [int(np.prod(variable.shape, dtype=np.int64)) for variable in self.metrics]
        self._base = None
        self._updates_begun = self._updates_done = 0
        self._batches_begun = self._batches_done = 0
        self._advanced = np.zeros(len(self.counters), np.float64)
        self._sums = np.zeros(sum(self._sizes), np.float64)

    @property
    def size(self):
        """How many numbers `added` gives."""
        return len(self.counters) + sum(self._sizes)

    # ------------------------------------------------------------------------ while tracing

    @contextlib.contextmanager
    def in_step(self, starts):
        """Context: the variables are those of the worker that runs the step.

        Args:
            starts: int64 tensor, as `next_starts` gives it.
        """
        kept = self.counters + self.seeds + self.metrics
        copies = [
            compat.local_variable(f"step_{number}_{id(self)}", variable.shape, variable.dtype)
            for number, variable in enumerate(kept)
        ]
        for copy, value in zip(copies, self._values(starts)):
            copy.assign(tf.cast(value, copy.dtype))
        with compat.stand_ins(kept, copies):
            yield

    def _values(self, starts):
        place = len(self.counters)
        values = [starts[number] for number in range(place)]
        values += [starts[place + 2 * i : place + 2 * i + 2] for i in range(len(self.seeds))]
        return values + [tf.zeros(variable.shape, variable.dtype) for variable in self.metrics]

    def added(self, starts):
        """Returns a float64 tensor: what the step has added to counters and metric states."""
        counted = [
            tf.cast(tf.cast(compat.raw_variable(variable), tf.int64) - starts[number], tf.float64)
            for number, variable in enumerate(self.counters)
        ]
        parts = [tf.reshape(value, [1]) for value in counted]
        parts += [
            tf.reshape(tf.cast(compat.raw_variable(variable), tf.float64), [-1])
            for variable in self.metrics
        ]
        return tf.concat(parts, 0) if parts else tf.zeros([0], tf.float64)

    # ---------------------------------------------------------------------------- on the chief

    def open(self):
        """Reads where counters and seeds stand; called when no step is under way."""
        self._base = [variable.numpy() for variable in self.counters + self.seeds]
        self._updates_begun = self._updates_done = 0
        self._batches_begun = self._batches_done = 0
        self._advanced[:] = 0

    def next_starts(self, batches=1):
        """Returns the int64 array that the next update begins with.

        Args:
            batches: Batches that it consumes.
        """
        under_way = self._updates_begun - self._updates_done
        counters = [
            int(base) + int(self._advanced[number]) + under_way * int(self._updates[number])
            for number, base in enumerate(self._base[: len(self.counters)])
        ]
        seeds = [
            [int(base[0]), int(base[1]) + self._batches_begun * int(self._draws[number])]
            for number, base in enumerate(self._base[len(self.counters) :])
        ]
        self._updates_begun += 1
        self._batches_begun += batches
        return np.array(counters + [number for pair in seeds for number in pair], np.int64)

    def add(self, added, batches=1):
        """Counts a finished update, once.

        Args:
            added: What `added` gave on the worker.
            batches: Batches that it consumed.
        """
        self._updates_done += 1
        self._batches_done += batches
        self._advanced += added[: len(self.counters)]
        self._sums += added[len(self.counters) :]

    def write(self):
        """Brings the variables up to the steps that were added."""
        for number, variable in enumerate(self.counters):
            variable.assign(int(self._base[number]) + int(self._advanced[number]))
        for number, variable in enumerate(self.seeds):
            seed, drawn = (int(part) for part in self._base[len(self.counters) + number])
            value = [seed, drawn + self._batches_done * int(self._draws[number])]
            variable.assign(np.array(value, variable.dtype))
        place = 0
        for variable, size in zip(self.metrics, self._sizes):
            part = self._sums[place : place + size].reshape(tuple(variable.shape))
            place += size
            if part.any():
                raw = compat.raw_variable(variable)
                raw.assign_add(part.astype(raw.dtype.as_numpy_dtype))
        self._sums[:] = 0


def state_of_step(building, replayed=(), window=None, noted=()):
    """Returns the `StepState` of a step.

    Args:
        building: The `Replica` in which the step was built: it knows what was assigned.
        replayed: Metrics that the chief updates itself.
        window: Where gradients are accumulated, or None.
        noted: Variables of metrics that only updates change, not the building.
    """
    elsewhere = {id(variable) for metric in replayed for variable in metric.variables}
    assigned = [v for v in building.assigned.values() if id(v) not in elsewhere]
    return StepState(
        counters=[
            (counter, updates if window is None else 1)
            for counter, updates in building.applied.values()
        ],
        seeds=[(v, _room(*building.draws[id(v)])) for v in assigned if id(v) in building.draws],
        metrics=[v for v in assigned if v.synchronization == "on_read"] + list(noted),
    )


def _room(draws, in_loop):
    return draws + (_ROOM_IN_LOOPS if in_loop else 0)
