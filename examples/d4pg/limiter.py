"""Keeps actors and learner in step: so many samples for each inserted transition."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Limiter:
    """Decides who has to wait.

    Of `(inserts - minimum) * samples_per_insert - samples`, the samples that are due, neither
    side may make more than `tolerance` in its favour.

    Args:
        samples_per_insert: the ratio to hold.
        minimum: inserts before the first sample; they do not count.
        tolerance: in samples.

    Example:

    >>> limiter = Limiter(samples_per_insert=4, minimum=10, tolerance=8)
    >>> limiter.may_sample(inserts=9, samples=0, count=4)
    False
    >>> limiter.may_sample(inserts=12, samples=8, count=8)  # 8 were due, and 8 may be ahead
    True
    >>> limiter.may_sample(inserts=12, samples=16, count=8)
    False
    >>> limiter.may_insert(inserts=12, samples=0), limiter.may_insert(inserts=13, samples=0)
    (True, False)
    """

    samples_per_insert: float
    minimum: int
    tolerance: float

    def due(self, inserts, samples):
        """Returns how many samples are due."""
        return (inserts - self.minimum) * self.samples_per_insert - samples

    def may_sample(self, inserts, samples, count):
        """Whether the learner may take `count` samples now."""
        return inserts >= self.minimum and self.due(inserts, samples) - count >= -self.tolerance

    def may_insert(self, inserts, samples):
        """Whether an actor may insert now."""
        return self.due(inserts, samples) <= self.tolerance


def make_limiter(config):
    """Returns the limiter of a `Config`: each side may be two of its portions ahead."""
    portion = config.samples_per_insert * config.insert_every * config.actors
    return Limiter(
        config.samples_per_insert, config.minimum, 2 * max(portion, float(config.batch_size))
    )
