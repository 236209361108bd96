"""The batches of a run, epoch after epoch, with `steps_per_epoch` as Keras means it.

Without `steps_per_epoch` every epoch reads the data once from the start. With it, one iterator
goes on over the epochs. Data that end in the middle of an epoch end it there, with one warning, and
the next epoch starts again with their first batch.

    position, place = stream.position(), stream.place()     # into a checkpoint
    stream.resume(position, place)                          # in the next process
"""

import warnings

from keras_replicator.checkpoints import CheckpointError
from keras_replicator.data.letting_go import let_go


class Stream:
    """Gives out iterators and counts what was consumed.

    Args:
        source: A `data.source.Source`.
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
        self._passes = 0  # how many have begun
        self._epochs = 0  # how many have ended
        self._resumed = None
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
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            position, place = resumed
            self._take_over(position)
        self.source.on_epoch_begin()
        is_over = self.steps is not None and self._consumed == self.num_batches
        if resumed is not None and position["is_open"] and (start or not is_over):
            self._iterator = self.source.resume(self._pass, self._consumed, self._passes - 1, place)
        elif self.steps is None:
            self._open(epoch, start, resumed is not None)
        elif self._pass < 0:
            earlier = epoch if earlier is None else earlier
            passes, batch = self._place_of(earlier, start)
            self._open(epoch - earlier + passes, batch, resumed is not None)
        elif is_over:
            self._open(self._pass + 1, 0, resumed is not None)

    def rewind(self):
        """Lets the next epoch begin with the first batch; a generator goes on instead."""
        if self.source.one_pass:
            return
        self._pass = -1
        self._let_go()
        if self._resumed is not None:
            position, _ = self._resumed
            self._resumed = ({**position, "pass": -1, "is_open": False}, None)

    def _place_of(self, epochs, start):
        """Returns `(pass, batch)` of step `start` after a number of epochs."""
        if not self.num_batches:
            return 0, epochs * self.steps + start
        passes, epochs = divmod(epochs, -(-self.num_batches // self.steps))
        return passes, epochs * self.steps + start

    def _take_over(self, position):
        self._pass, self._consumed = position["pass"], position["consumed"]
        self._passes, self._epochs = position["passes"], position["epochs"]
        if self.num_batches is None:
            self.num_batches = position["num_batches"]
        self.source.catch_up(self._epochs)

    def _open(self, number, start=0, is_resumed=False):
        self._let_go()
        self._pass = number
        self._consumed = start
        if is_resumed:
            self._iterator = self.source.resume(number, start, self._passes)
        else:
            self._iterator = self.source.iterator(number, start)
        self._passes += 1

    # --------------------------------------------------------------------------- checkpoints

    def position(self):
        """Returns where the stream is, as JSON values."""
        return {
            "pass": self._pass,
            "consumed": self._consumed,
            "passes": self._passes,
            "epochs": self._epochs,
            "is_open": self._iterator is not None,
            "num_batches": self.num_batches,
            "made_for": self.source.made_for,
            "facts": {**self.source.facts(), "the steps per epoch": self.steps_per_epoch},
        }

    def place(self):
        """Returns the place of the open iterator, a dict of tensors, where it can be saved."""
        return None if self._iterator is None else self.source.place(self._iterator)

    def check(self, position):
        """Finds out whether these data can go on from a position.

        Raises:
            CheckpointError: When they are other data, in the middle of which nobody can go on.
        """
        if not position["is_open"]:
            return
        facts = self.position()["facts"]
        for name, before in position["facts"].items():
            now = facts.get(name)
            if before is not None and now is not None and before != now:
                raise CheckpointError(
                    f"The checkpoint was written in the middle of an epoch, and {name} has changed "
                    f"since: {before!r} then, {now!r} now. Pass the data and arguments of the run "
                    "that wrote it, or go on with weights and optimizer alone: "
                    "trainer.restore_checkpoint(directory), then fit(initial_epoch=…)."
                )

    def resume(self, position, place=None):
        """Lets the next epoch go on at a position that `position` returned.

        Args:
            position: The position.
            place: What `place` returned, or None.
        """
        self._resumed = (position, place if position["made_for"] == self.source.made_for else None)

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
        self._epochs += 1
        if self.steps is None:
            self._let_go()
        self.source.on_epoch_end()

    def _let_go(self):
        held, self._iterator = [self._iterator], None
        if held[0] is not None and self.source.is_tuned:
            let_go(held)
