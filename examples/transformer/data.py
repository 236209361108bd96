"""The text that this repository ships, as sequences of characters.

text = read_text()
vocabulary = Vocabulary(text)
x, y = sequences(vocabulary.encode(text), length=64)
"""

from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def read_text():
    """Returns the license and the documentation of this repository."""
    paths = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


class Vocabulary:
    """Characters and their numbers.

    Args:
        text: Text that holds every character.
        multiple: The size is rounded up to a multiple of it, so that a mesh can split it.
    """

    def __init__(self, text, multiple=8):
        self.characters = sorted(set(text))
        self.size = -(-len(self.characters) // multiple) * multiple
        self._numbers = {character: number for number, character in enumerate(self.characters)}

    def encode(self, text):
        """Returns the numbers of a text, an int32 array."""
        return np.array([self._numbers[character] for character in text], "int32")

    def decode(self, numbers):
        """Returns the text of some numbers."""
        return "".join(self.characters[number] for number in numbers)


def sequences(numbers, length):
    """Cuts a text in sequences and their continuations, one character further.

    Args:
        numbers: int32 array of characters.
        length: characters of a sequence.

    Returns:
        `(x, y)`, int32 arrays of shape `(sequences, length)`.
    """
    count = (len(numbers) - 1) // length
    return (
        numbers[: count * length].reshape(count, length),
        numbers[1 : count * length + 1].reshape(count, length),
    )
