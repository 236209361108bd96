"""Iterators of batches that can be set to a place."""

from keras_replicator import compat
from keras_replicator.data.source import Source, prefetched, shared


class SeekableSource(Source):
    """An iterator of batches that can be set to a place: `x.seek(batch)` makes that the next."""

    can_seek = True
    kind = "an iterator with a method `seek`"

    def __init__(self, batches, shard):
        self._batches = batches
        self._shard = shard
        self._adapter = compat.adapter_for(
            (batch for batch in batches),
            batch_size=None,
            steps=None,
            shuffle=False,
            class_weight=None,
        )
        self._dataset = self._from(0)
        self.element_spec = self._dataset.element_spec
        self._kept = False

    def _from(self, start):
        def read():
            self._batches.seek(start)
            yield from self._batches

        self._adapter.generator = read
        return shared(self._adapter.get_tf_dataset(), self._shard)

    def keep_first(self, count, repeat=False):
        super().keep_first(count, repeat)
        self._kept = True

    def iterator(self, number, start=0):
        dataset = self._dataset.skip(start) if self._kept else self._from(start)
        return iter(prefetched(dataset))
