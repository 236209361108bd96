"""A stream of global batches: what the loop asks of data, whatever they are.

An element is `(rows, batch)`: the rows of the *global* batch and this worker's part of it. Of
several workers each reads the same batches, keeps its rows, and adds marks of what it read as a
third part of the element (`fingerprint.py`); or each reads batches of its own (`own.py`).
"""

import tensorflow as tf

from keras_replicator.data.fingerprint import marks_of
from keras_replicator.data.rows import at_least_one, count_rows, slice_rows


class Source:
    """A stream of global batches, one pass after the other.

    Attributes:
        num_batches: Batches of a pass, or None where that is not known.
        element_spec: The `tf.TypeSpec` nest of `(rows, batch)`.
        can_seek: Whether a pass can start at any batch without reading those before.
        is_counted: Whether an iterator is known to hold `num_batches` batches, or never to end.
        one_pass: Whether the data can be read once only, as a generator.
        is_tuned: Whether tf.data tunes the pipeline: the user's own, but none of ours.
        made_for: What the batches depend on; a place in them holds for the same only.
        kind: What the user calls these data.
    """

    num_batches = None
    can_seek = False
    _dataset = None
    is_counted = False
    one_pass = False
    is_tuned = False
    # How the rows are spread over workers, as the end of "each worker reads …".
    sharding = "every batch, in the same order, and keeps its rows"
    made_for = ""
    kind = "data"

    def iterator(self, number, start=0):
        """Returns a `tf.data` iterator over the batches of a pass, from batch `start` on."""
        raise NotImplementedError

    def keep_first(self, count, repeat=False):
        """Makes an epoch of the first `count` batches, read once and the same in every epoch.

        Args:
            count: How many batches.
            repeat: Whether they come again and again, for epochs of more steps.
        """
        dataset = self._dataset.take(count).cache()
        found = sum(1 for _ in dataset)
        self.num_batches = None if repeat else found
        self._dataset = dataset.repeat() if repeat else dataset

    def resume(self, number, start, passes, place=None):
        """Returns the iterator of a run that goes on.

        Args:
            number: Number of the pass.
            start: Batches of this pass that have been consumed.
            passes: How many passes had begun before this one.
            place: What `place` returned, or None.

        Raises:
            CheckpointError: When the place does not fit these data.
        """
        del passes, place
        return self.iterator(number, start)

    def place(self, iterator):
        """Returns the place of an iterator, a dict of tensors, where it can be saved; else None."""
        del iterator

    def catch_up(self, epochs):
        """Tells data that change from epoch to epoch how many epochs lie behind."""

    def check_resume(self):
        """Raises `ValueError` when a run on these data can never be resumed."""

    def facts(self):
        """Returns what must be alike when a run goes on in the middle of these data."""
        return {"the data": self.kind}

    def describe(self, plan):
        """Returns the lines that `print(trainer.plan)` shows about the batches."""
        return {
            "global batch": "as the data set gives it, split in order over replicas",
            **self._describe_sharding(plan),
        }

    def _describe_sharding(self, plan):
        if plan.num_workers == 1:
            return {}
        return {"sharding": f"each worker reads {self.read_by_each(plan)}"}

    def read_by_each(self, plan):
        """Returns what each of several workers reads, in words."""
        return "the whole of every batch" if plan.strategy == "mesh" else self.sharding

    def reseed(self, seed):
        """Takes the seed of a run that is resumed."""

    def on_epoch_begin(self):
        """Tells the data that an epoch begins."""

    def on_epoch_end(self):
        """Tells the data that an epoch has ended."""


def shared(dataset, shard):
    """Maps elements to `(rows, batch)`: the global batch's rows and this worker's part of it."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def take_share(*element):
        batch = element if is_tuple else element[0]
        rows = count_rows(batch)
        if shard.is_whole:
            return rows, batch
        return rows, slice_rows(batch, *at_least_one(*shard.rows(rows), rows)), marks_of(batch)

    return dataset.map(take_share)


def prefetched(dataset, is_tuned=False):
    """Prepares a data set for iteration.

    Args:
        dataset: The data set of `(rows, batch)`.
        is_tuned: Whether tf.data may tune it, as the user's own pipeline wants; see letting_go.py
            for what that costs. Ours have one map, whose parallelism needs no tuning.
    """
    options = tf.data.Options()
    if not is_tuned:
        options.autotune.enabled = False
    # Nobody distributes these data sets again: no sharding policy, no line about one.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
