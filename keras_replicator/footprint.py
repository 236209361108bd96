"""Bytes per device: weights, optimizer slots and gradients, from shapes alone."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Piece:
    """A variable as one device holds it.

    Args:
        path: Its path.
        shape: Its whole shape.
        itemsize: Bytes of an element.
        parts: Over how many devices it is split.
        trainable: Whether it has a gradient.
    """

    path: str
    shape: tuple
    itemsize: int
    parts: int = 1
    trainable: bool = False

    @property
    def bytes(self):
        """Bytes on each device."""
        return math.prod(self.shape) * self.itemsize // self.parts


def foresee(weights, slots=None):
    """Returns `((what, bytes on each device), …)`; None for slots that are not known yet.

    Args:
        weights: `Piece`s of the models.
        slots: `Piece`s of the optimizers, or None where they are not known yet.
    """
    gradients = [piece for piece in weights if piece.trainable]
    return (
        ("weights", total(weights)),
        ("slots", None if slots is None else total(slots)),
        ("gradients", total(gradients)),
    )


def describe(counts):
    """Returns the text of what `foresee` returned.

    Example:

    >>> describe(foresee([Piece("dense/kernel", (1024, 1024), 4, parts=4, trainable=True)], []))
    'weights 1.0 MB, slots 0 B, gradients 1.0 MB; 2.1 MB in all'
    """
    texts = [
        f"{name} {'not known yet' if count is None else readable(count)}" for name, count in counts
    ]
    everything = sum(count or 0 for _, count in counts)
    return f"{', '.join(texts)}; {readable(everything)} in all"


def total(pieces):
    """Returns the bytes of some pieces on each device."""
    return sum(piece.bytes for piece in pieces)


def readable(count):
    """Returns a number of bytes in units of 1000.

    Example:

    >>> readable(2_500_000)
    '2.5 MB'
    """
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units))
    return f"{count / 1000**power:.1f} {units[power - 1]}"
