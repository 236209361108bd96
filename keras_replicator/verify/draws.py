"""Random numbers, drawn as on one device: the suspect "randomness", switched off.

The run on one device records what every random operation gave. A run on replicas that shares the
draws takes these numbers instead of its own: a replica gets its rows of the k-th draw. NumPy's and
Python's global generators are treated alike.
"""

import contextlib
import gc
import inspect
import random
import threading

import numpy as np
import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.data.split import boundary
from keras_replicator.verify.recorder import find_place

_NUMPY = (
    "rand randn random random_sample normal standard_normal uniform randint choice permutation "
    "binomial poisson exponential beta gamma"
).split()
_PYTHON = "random uniform randint randrange gauss normalvariate betavariate choice".split()


class Draws:
    """Records draws on one device, and hands them out to replicas.

    Attributes:
        mode: "own", "record" or "share".
        recorded: List of lists of arrays: the draws of each step on one device.
        used: Whether the last run drew anything.
        places: List of the places in the code that drew, of all runs.
        generators_advance: Whether a `numpy.random.Generator` of the user's moved on in a step.
    """

    def __init__(self):
        self.mode = "own"
        self.recorded = []
        self.used = False
        self.places = []
        self.generators_advance = False
        self._generators = []
        self._step = 0
        self._taken = {}
        self._lock = threading.Lock()

    def begin(self, mode):
        """Begins a run."""
        self._compare_generators()
        self.mode = mode
        self.used = False
        if mode == "record":
            self.recorded = []
            found = (o for o in gc.get_objects() if isinstance(o, np.random.Generator))
            self._generators = [(generator, _state_of(generator)) for generator in found]

    def _compare_generators(self):
        """Between the first two runs: did the first one use a generator?"""
        advanced = [_state_of(generator) != state for generator, state in self._generators]
        self.generators_advance = self.generators_advance or any(advanced)
        self._generators = []

    def begin_step(self, step):
        """Begins a step of the run, by its number."""
        self._step = step
        self._taken = {}
        if self.mode == "record":
            self.recorded.append([])

    @contextlib.contextmanager
    def installed(self):
        """Context: random operations pass by here."""
        places = [
            *compat.random_operations(),
            *((np.random, name) for name in _NUMPY),
            *((random, name) for name in _PYTHON),
        ]
        originals = [(owner, name, getattr(owner, name)) for owner, name in places]
        for owner, name, original in originals:
            setattr(owner, name, self._wrap(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _wrap(self, original):
        def draw(*args, **kwargs):
            value = original(*args, **kwargs)
            current = replica.current()
            if current is None or current.building:
                return value
            if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
                return value  # inside of a graph
            return self._pass(current, value)

        return draw

    def _pass(self, current, value):
        with self._lock:
            self.used = True
            number = self._taken.get(current.index, 0)
            self._taken[current.index] = number + 1
            place = find_place(inspect.currentframe()) if current.index == 0 else None
            if place is not None:
                self.places.append(place)
        if self.mode == "record":
            self.recorded[-1].append(_array(value))
            return value
        if self.mode == "own" or self._step >= len(self.recorded):
            return value
        known = self.recorded[self._step]
        if number >= len(known):
            return value
        part = _part(known[number], np.shape(_array(value)), current)
        if part is None:
            return value
        return _like(value, part)


def _state_of(generator):
    return str(generator.bit_generator.state)


def _array(value):
    return value.numpy() if isinstance(value, tf.Tensor) else np.asarray(value)


def _like(value, part):
    if isinstance(value, tf.Tensor):
        return tf.constant(part, value.dtype)
    return part if isinstance(value, np.ndarray) else part.item()


def _part(whole, shape, current):
    """A replica's part of a draw of one device, or None where they do not belong together."""
    if whole.shape == tuple(shape):
        return whole
    axes = [axis for axis, sizes in enumerate(zip(whole.shape, shape)) if sizes[0] != sizes[1]]
    if whole.ndim != len(shape) or len(axes) != 1 or current.rows is None:
        return None
    axis, rows, total = axes[0], max(int(current.rows), 1), int(current.total_rows)
    if whole.shape[axis] % total or shape[axis] % rows:
        return None
    times = whole.shape[axis] // total
    if shape[axis] != times * rows:
        return None
    begin = times * min(boundary(total, current.index, current.num_replicas), total - rows)
    return np.take(whole, range(begin, begin + shape[axis]), axis)
