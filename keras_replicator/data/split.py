"""Which rows go where: the balanced, order-preserving split of a global batch.

    part p of n gets the rows  p*b//n : (p+1)*b//n   of a global batch of b rows

Sizes differ by at most one row, every row is used once, and with fewer rows than replicas some
replicas get none. Pure arithmetic: works on ints and on integer tensors alike.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shard:
    """The replicas that one worker drives, as a range of all replicas.

    Args:
        first: Number of the worker's first replica.
        count: How many replicas the worker drives.
        total: Number of replicas of the job.
    """

    first: int = 0
    count: int = 1
    total: int = 1

    @property
    def is_whole(self):
        """Whether this worker drives every replica."""
        return self.count == self.total

    def rows(self, batch_rows):
        """Returns `(begin, end)`, this worker's rows of a global batch."""
        return (
            boundary(batch_rows, self.first, self.total),
            boundary(batch_rows, self.first + self.count, self.total),
        )

    def replica_rows(self, batch_rows, replica):
        """Returns `(begin, end)` of a replica's rows, counted within this worker's rows.

        Args:
            batch_rows: Rows of the global batch.
            replica: Number of the replica over all workers.
        """
        offset = boundary(batch_rows, self.first, self.total)
        return (
            boundary(batch_rows, replica, self.total) - offset,
            boundary(batch_rows, replica + 1, self.total) - offset,
        )


def boundary(batch_rows, part, parts):
    """Returns the first row of part `part` when a batch is split in `parts` parts.

    Example:

    >>> [boundary(6, part, 4) for part in range(5)]
    [0, 1, 3, 4, 6]
    """
    return part * batch_rows // parts
