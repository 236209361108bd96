"""What Keras' own data adapters read batch after batch: generators, DataLoaders and others."""

from keras_replicator import compat
from keras_replicator.data.places import read_up_to
from keras_replicator.data.source import Source, prefetched, shared


class AdapterSource(Source):
    """What Keras' other adapters read: generators, DataLoaders, sparse arrays."""

    def __init__(self, adapter, shard, argument="x"):
        self._adapter = adapter
        self.num_batches = adapter.num_batches
        self._shard = shard
        self._argument = argument
        self._is_generator = compat.is_generator_adapter(adapter)
        self.one_pass = self._is_generator
        name = type(adapter).__name__
        self.kind = "a generator" if self._is_generator else f"what {name} reads"
        self._dataset = shared(adapter.get_tf_dataset(), shard)
        self.element_spec = self._dataset.element_spec
        self._fresh = True
        self._kept = False

    def iterator(self, number, start=0):
        # An adapter's data set carries the order of its epoch, so each epoch takes a new one.
        as_it_is = self._fresh or self._kept
        dataset = self._dataset if as_it_is else shared(self._adapter.get_tf_dataset(), self._shard)
        self._fresh = False
        return iter(prefetched(dataset.skip(start) if start else dataset))

    def keep_first(self, count, repeat=False):
        self.on_epoch_begin()
        super().keep_first(count, repeat)
        self.one_pass = False
        self.on_epoch_end()
        self._kept = True  # nothing is read from the adapter any more

    def resume(self, number, start, passes, place=None):
        iterator = self.iterator(number)
        if start:
            read_up_to(iterator, start, self.kind, None, self._shard.first == 0)
        return iterator

    def check_resume(self):
        if self._is_generator:
            raise ValueError(
                f"`{self._argument}` is a generator, which starts anew in every process and cannot "
                "be set to the place where a run stopped, so this run cannot be resumed exactly. "
                "Pass a PyDataset, a tf.data.Dataset, or an iterator with a method `seek(batch)`; "
                "or leave out `resume`, and go on with weights and optimizer alone: "
                "trainer.restore_checkpoint(directory), then fit(initial_epoch=…). "
                f"Received: {self._argument} of type generator with resume=…"
            )

    def on_epoch_begin(self):
        if not self._kept:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self):
        if not self._kept:
            self._adapter.on_epoch_end()
