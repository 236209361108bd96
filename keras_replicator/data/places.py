"""The place in a `tf.data` pipeline: saved where TensorFlow can, else found again by reading.

TensorFlow saves an iterator with its shuffle and prefetch buffers and its random numbers. It
cannot save what runs Python (`from_generator`, `numpy_function`) or draws stateful random numbers.

A pass of seeded shuffles is ordered by how many passes began before: each shuffle takes the next
seed when its iterator is made. A resumed run therefore begins the passes again that lie behind it,
which reads nothing as a rule.
"""

import sys
import time

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.checkpoints import CheckpointError
from keras_replicator.long_work import announced


class Passes:
    """What a data set's passes depend on.

    Attributes:
        why_not: Why a saved place does not tell the order of later passes, or None. Reading does.

    Args:
        dataset: A `tf.data.Dataset`.
        is_endless: Whether a single pass goes on for ever.
    """

    def __init__(self, dataset, is_endless=False):
        parts = compat.pipeline_parts(dataset)
        self._is_endless = is_endless
        shuffles = [part for part in parts if "Shuffle" in part[0]]
        has_order = bool(shuffles) and all(has_seed for _, _, has_seed in shuffles)
        # A shuffle behind another one takes its seed with the first row.
        self._is_nested = any(depth for _, depth, _ in shuffles)
        self._caches = any("Cache" in kind for kind, _, _ in parts)
        self._repeats = not is_endless and any("Repeat" in kind for kind, _, _ in parts)
        self.why_not = None
        if has_order and not is_endless:
            if self._is_nested:
                self.why_not = "one shuffle is behind another"
            elif self._caches:
                self.why_not = "a cache is filled in the first pass only"
            elif self._repeats:
                self.why_not = "it repeats its rows within a pass"

    def begin_again(self, dataset, passes):
        """Begins as many passes as lie behind, so that the next one has its order."""
        for number in range(passes):
            iterator = iter(dataset)
            reads = self._repeats or (self._caches and (number == 0 or self._is_nested))
            if reads and not self._is_endless:
                for _ in iterator:
                    pass
            elif self._is_nested:
                next(iterator, None)


def place_of(iterator):
    """Returns `(place, None)`, or `(None, why)` where TensorFlow cannot save it."""
    try:
        return compat.save_iterator(iterator), None
    except tf.errors.OpError as error:
        return None, _reason(error)


def set_place(iterator, place):
    """Sets an iterator to a place.

    Raises:
        CheckpointError: When the place belongs to another pipeline.
    """
    try:
        compat.restore_iterator(iterator, place)
    except tf.errors.OpError as error:
        raise CheckpointError(
            "The place in the data set does not fit: the tf.data pipeline is another one than "
            "when the checkpoint was written. Make it as it was, or go on with weights and "
            "optimizer alone: trainer.restore_checkpoint(directory), then fit(initial_epoch=…). "
            f"TensorFlow says: {_reason(error)}"
        ) from error


def read_up_to(iterator, batches, kind, why, is_chief):
    """Reads the batches that a run has consumed already, and says how long that took.

    Raises:
        CheckpointError: When the data end before.
    """
    started = time.monotonic()
    with announced("Reading up to the place where the run stopped", is_chief):
        for number in range(batches):
            try:
                next(iterator)
            except (StopIteration, tf.errors.OutOfRangeError) as error:
                raise CheckpointError(
                    f"The data end after {number} batches, and the run stopped after {batches}. "
                    f"Pass the data that the checkpoint was written with. Received: {kind}"
                ) from error
    if is_chief:
        reason = f" ({why})" if why else ""
        print(
            f"Read {batches} batches in {time.monotonic() - started:.1f} s to come to the place "
            f"where the run stopped: the place in {kind} cannot be saved{reason}. They must come "
            "in the same order as before.",
            file=sys.stderr,
        )


def _reason(error):
    return str(error).strip().splitlines()[0].rpartition("}} ")[2][:200]
