"""A sum tree: draws an index in proportion to its priority, in logarithmic time."""

import numpy as np


class SumTree:
    """Priorities of `capacity` indices, with their sums over halves, quarters and so on.

    Args:
        capacity: number of indices.

    Example:

    >>> tree = SumTree(4)
    >>> tree.set([0, 1, 3], [1.0, 2.0, 5.0])
    >>> tree.total
    8.0
    >>> tree.find([0.5, 1.0, 2.9, 3.0]).tolist()
    [0, 1, 1, 3]
    """

    def __init__(self, capacity):
        self._leaves = 1 << max(capacity - 1, 1).bit_length()  # the next power of two
        self._sums = np.zeros(2 * self._leaves)  # the children of node i are 2 i and 2 i + 1

    @property
    def total(self):
        """The sum of all priorities."""
        return float(self._sums[1])

    def get(self, indices):
        """Returns the priorities of indices."""
        return self._sums[np.asarray(indices) + self._leaves]

    def set(self, indices, priorities):
        """Sets the priorities of indices; of an index that comes twice the last one counts."""
        nodes = np.asarray(indices) + self._leaves
        self._sums[nodes] = priorities
        while nodes.size and nodes[0] > 1:
            nodes = np.unique(nodes // 2)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, sums):
        """Returns, for each number s in [0, total), the index i of which the priorities before
        it add up to at most s, and those up to it to more than s."""
        sums = np.array(sums, float)
        nodes = np.ones(len(sums), np.int64)
        while len(nodes) and nodes[0] < self._leaves:
            left = self._sums[2 * nodes]
            # A sum that rounding has carried past the end stays where there is something.
            right = (sums >= left) & (self._sums[2 * nodes + 1] > 0)
            sums -= np.where(right, left, 0.0)
            nodes = 2 * nodes + right
        return nodes - self._leaves
