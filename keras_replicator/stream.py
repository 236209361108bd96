"""The batches of a run, epoch after epoch, with `steps_per_epoch` as Keras means it.

Without `steps_per_epoch` every epoch reads the data once from the start. With it, one iterator
goes on over the epochs. Data that end in the middle of an epoch end it there, with one warning, and
the next epoch starts again with their first batch.
"""

import warnings


class Stream:
    """Gives out iterators and counts what was consumed.

    Args:
        source: A `data.sources.Source`.
        steps: Steps per epoch, or None for the whole data.
        argument: Name of the argument that `steps` came from, for messages.
    """

    def __init__(self, source, steps=None, argument="steps_per_epoch"):
        if steps is not None and (int(steps) != steps or steps < 1):
            raise ValueError(
                f"`{argument}` must be an int of at least 1. Received: {argument}={steps}"
            )
        self.source = source
        self.steps = None if steps is None else int(steps)
        self.num_batches = source.num_batches
        self._argument = argument
        self._iterator = None
        self._pass = -1
        self._consumed = 0  # batches of the current pass
        self._warned = False

    @property
    def steps_per_epoch(self):
        """Steps of an epoch, or None where that is not known yet."""
        return self.steps if self.steps is not None else self.num_batches

    def begin_epoch(self, epoch, start=0, earlier=None):
        """Prepares the iterator of an epoch.

        Args:
            epoch: Number of the epoch, which the order of rows follows.
            start: Batches of this epoch that have been consumed already (resume).
            earlier: Epochs of this run before this one (resume); by default `epoch`.
        """
        self.source.on_epoch_begin()
        if self.steps is None:
            self._open(epoch, start)
        elif self._pass < 0:
            earlier = epoch if earlier is None else earlier
            passes, batch = self._place(earlier, start)
            self._open(epoch - earlier + passes, batch)
        elif self._consumed == self.num_batches:
            self._open(self._pass + 1)

    def rewind(self):
        """Lets the next epoch begin with the first batch; a generator goes on instead."""
        if not self.source.one_pass:
            self._pass = -1

    def _place(self, epochs, start):
        """Returns `(pass, batch)` of step `start` after a number of epochs."""
        if not self.num_batches:
            return 0, epochs * self.steps + start
        passes, epochs = divmod(epochs, -(-self.num_batches // self.steps))
        return passes, epochs * self.steps + start

    def _open(self, number, start=0):
        self._pass = number
        self._consumed = start
        self._iterator = self.source.iterator(number, start)

    def available(self, wanted):
        """Returns how many of `wanted` steps the data can give, as far as that is known."""
        if self.num_batches is None:
            return wanted
        return min(wanted, self.num_batches - self._consumed)

    @property
    def lasts(self):
        """Whether the current iterator is known to hold the steps that `available` allows."""
        return self.source.is_counted

    @property
    def iterator(self):
        """The current `tf.data` iterator."""
        return self._iterator

    def consumed(self, steps):
        """Counts batches that a call has consumed."""
        self._consumed += steps

    def ended(self, step):
        """Called when the data ended after `step` steps of an epoch.

        Returns:
            Whether the epoch goes on with a new iterator.
        """
        if self._consumed == 0 and step == 0:
            raise ValueError(
                "The data hold no batches. Pass data with at least one row; a generator that has "
                "been read to its end gives nothing more."
            )
        if self.num_batches is None:
            self.num_batches = self._consumed
        if self.steps is None:
            return False
        if step == 0 and not self.source.one_pass:
            self._open(self._pass + 1)
            return True
        if step < self.steps:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"The data ended after {step} of the {self.steps} steps that "
                    f"`{self._argument}` promises; the epoch ends here. Make the data set longer "
                    "(`dataset.repeat()`), or lower the number of steps.",
                    stacklevel=4,
                )
        return False

    def end_epoch(self):
        """Tells the data that an epoch has ended."""
        self.source.on_epoch_end()
