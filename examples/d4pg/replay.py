"""The replay: the latest transitions, drawn uniformly or by priority.

replay = Replay(capacity=1000, chooser=Uniform(), seed=0)
replay.insert({"observation": …, "action": …})     # arrays [n, ...]
batch = replay.sample(256)                          # batch.rows, batch.keys
replay.update_priorities(batch.keys, priorities)
"""

import dataclasses
import json

import numpy as np

from d4pg.sum_tree import SumTree


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sampled transitions.

    Attributes:
        keys: `[n]`, numbers by which the replay knows them.
        rows: dict of arrays `[n, ...]`, with the importance `weight` among them.
    """

    keys: np.ndarray
    rows: dict


class Replay:
    """Holds up to `capacity` transitions; the oldest make room for new ones.

    The key of a transition is its number among all that were ever inserted.

    Args:
        capacity: number of transitions.
        chooser: `Uniform` or `Prioritised`.
        seed: seed of what is drawn.

    Raises:
        ValueError: when `capacity` is below 1.
    """

    def __init__(self, capacity, chooser, seed=None):
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1. Received: capacity={capacity}")
        self._capacity = capacity
        self._chooser = chooser
        self._random = np.random.default_rng(seed)
        self._columns = {}
        self.inserted = 0

    def __len__(self):
        return min(self.inserted, self._capacity)

    def insert(self, rows):
        """Inserts transitions, a dict of arrays `[n, ...]`, with the highest priority so far."""
        count = len(next(iter(rows.values())))
        slots = (self.inserted + np.arange(count)) % self._capacity
        for name, values in rows.items():
            if name not in self._columns:
                shape = (self._capacity, *values.shape[1:])
                self._columns[name] = np.zeros(shape, values.dtype)
            self._columns[name][slots] = values
        self.inserted += count
        self._chooser.inserted(slots)

    def sample(self, count):
        """Returns a `Batch` of `count` transitions, drawn with replacement."""
        slots, weights = self._chooser.choose(self._random, count, len(self))
        rows = {name: column[slots] for name, column in self._columns.items()}
        rows["weight"] = weights
        # The latest number that belongs into the slot.
        last = self.inserted - 1
        return Batch(last - (last - slots) % self._capacity, rows)

    def update_priorities(self, keys, priorities):
        """Sets priorities `[n]`; keys of transitions that are gone by now are passed over."""
        alive = keys >= self.inserted - self._capacity
        self._chooser.prioritise(keys[alive] % self._capacity, np.asarray(priorities)[alive])

    def save(self, path):
        """Writes all transitions, priorities and the random state to one file."""
        size = len(self)
        columns = {f"column/{name}": column[:size] for name, column in self._columns.items()}
        with open(path, "wb") as file:
            np.savez(
                file,
                inserted=self.inserted,
                capacity=self._capacity,
                random=json.dumps(self._random.bit_generator.state),
                priorities=self._chooser.priorities(size),
                **columns,
            )

    def load(self, path):
        """Takes everything from a file that `save` wrote.

        Raises:
            ValueError: when it was written by a replay of another capacity.
        """
        with np.load(path) as file:
            if int(file["capacity"]) != self._capacity:
                raise ValueError(
                    f"`capacity` must be that of the run that is resumed, {file['capacity']}. "
                    f"Received: capacity={self._capacity}"
                )
            self.inserted = int(file["inserted"])
            self._random.bit_generator.state = json.loads(str(file["random"]))
            size = len(self)
            for name in file.files:
                if name.startswith("column/"):
                    values = file[name]
                    column = np.zeros((self._capacity, *values.shape[1:]), values.dtype)
                    column[:size] = values
                    self._columns[name.removeprefix("column/")] = column
            self._chooser.restore(np.arange(size), file["priorities"])


class Uniform:
    """Draws every transition with the same probability; all weights are 1."""

    def inserted(self, slots):
        """Told which slots were filled."""

    def choose(self, random, count, size):
        """Returns slots `[count]` and importance weights `[count]`."""
        return random.integers(0, size, count), np.ones(count, np.float32)

    def prioritise(self, slots, priorities):
        """Priorities change nothing."""

    def priorities(self, size):
        """Returns what to save."""
        return np.ones(0)

    def restore(self, slots, priorities):
        """Takes what was saved."""


class Prioritised:
    """Draws transitions by priority (Schaul et al. 2016, arXiv 1511.05952, section 3.3).

    The probability of i is `p_i^exponent / sum of p_j^exponent`. Its weight is
    `(size * probability)^-importance`, divided by the largest weight of the batch. A new
    transition has the highest priority so far.

    Args:
        capacity: that of the replay.
        exponent: 0 draws uniformly, 1 in proportion to the priority.
        importance: 0 leaves all weights at 1, 1 makes up for the choice entirely.
    """

    _SMALLEST = 1e-6  # nothing is never drawn again

    def __init__(self, capacity, exponent, importance):
        self._tree = SumTree(capacity)
        self._exponent = exponent
        self._importance = importance
        self._highest = 1.0  # of the priorities to the power of the exponent

    def inserted(self, slots):
        """Told which slots were filled."""
        self._tree.set(slots, np.full(len(slots), self._highest))

    def choose(self, random, count, size):
        """Returns slots `[count]`, one from each of `count` equal parts, and weights `[count]`."""
        total = self._tree.total
        slots = self._tree.find((np.arange(count) + random.random(count)) * (total / count))
        weights = (size * self._tree.get(slots) / total) ** -self._importance
        return slots, (weights / weights.max()).astype(np.float32)

    def prioritise(self, slots, priorities):
        """Sets the priorities of slots."""
        powers = np.maximum(np.asarray(priorities, float), self._SMALLEST) ** self._exponent
        self._tree.set(slots, powers)
        self._highest = max(self._highest, powers.max(initial=0.0))

    def priorities(self, size):
        """Returns what to save: `[size + 1]`, the highest one last."""
        return np.append(self._tree.get(np.arange(size)), self._highest)

    def restore(self, slots, priorities):
        """Takes what was saved."""
        self._tree.set(slots, priorities[:-1])
        self._highest = float(priorities[-1])


def make_replay(config, seed=None):
    """Returns the replay of a `Config`."""
    chooser = Uniform()
    if config.prioritised:
        chooser = Prioritised(config.capacity, config.priority_exponent, config.importance_exponent)
    return Replay(config.capacity, chooser, seed)
