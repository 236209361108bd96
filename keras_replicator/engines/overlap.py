"""Which steps may run at the same time, so that a bound on staleness holds.

The staleness of a step is how many updates of other steps come between its reading of the weights
and its own update. Only a step that is under way at the same time can do that, so a step never
overlaps with more than `max_staleness` others:

    overlap = Overlap(max_staleness=1, most=4)
    overlap.start(0), overlap.start(1)
    overlap.may_start()        # False: 0 and 1 overlap with each other already
    overlap.finish(1)
    overlap.may_start()        # False: 0 would overlap with a second one
    overlap.finish(0)
    overlap.may_start()        # True
"""


class Overlap:
    """Counts with how many others each step that is under way overlaps.

    Args:
        max_staleness: The bound, at least 0, or None for none.
        most: Steps that may be under way at the same time.
    """

    def __init__(self, max_staleness, most):
        self._bound = max_staleness
        self._most = most
        self._met = {}  # step under way -> others that were under way during any of its time

    def __len__(self):
        return len(self._met)

    def may_start(self):
        """Whether another step keeps the bound, its own and that of those under way."""
        if len(self._met) >= self._most:
            return False
        if self._bound is None:
            return True
        return len(self._met) <= self._bound and all(
            met + 1 <= self._bound for met in self._met.values()
        )

    def start(self, step):
        """Notes that a step begins."""
        for other in self._met:
            self._met[other] += 1
        self._met[step] = len(self._met)

    def finish(self, step):
        """Notes that a step has ended."""
        del self._met[step]

    def clear(self):
        """Forgets every step."""
        self._met.clear()
