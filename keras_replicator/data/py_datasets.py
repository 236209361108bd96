"""A `keras.utils.PyDataset`, whose batches are read by index."""

import keras
import numpy as np

from keras_replicator import compat
from keras_replicator.data.source import Source, prefetched, shared


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, read by index; with `shuffle` in an order of (seed, epoch)."""

    can_seek = True
    kind = "a PyDataset"

    def __init__(self, dataset, shuffle, seed, shard, class_weight=None):
        self._inner = dataset
        self._shuffle = bool(shuffle) and dataset.num_batches is not None
        self._seed = seed
        self._shard = shard
        self._class_weight = class_weight
        self.num_batches = dataset.num_batches
        if self.num_batches == 0:
            raise ValueError("The PyDataset has length 0: it holds no batches.")
        in_order = None if self.num_batches is None else np.arange(self.num_batches)
        self._adapter = self._adapter_of(in_order, 0)
        # Reads two batches for their types and shapes; later passes take those over.
        self._dataset = shared(self._adapter.get_tf_dataset(), shard)
        self.element_spec = self._dataset.element_spec
        self._kept = False

    def _adapter_of(self, order, start):
        view = _PyDatasetView(self._inner, order, start)
        return compat.adapter_for(
            view, batch_size=None, steps=None, shuffle=False, class_weight=self._class_weight
        )

    def order(self, number):
        """Returns the order of batches in a pass, or None where they have no end."""
        if self.num_batches is None:
            return None
        if not self._shuffle:
            return np.arange(self.num_batches)
        return np.random.default_rng([abs(int(self._seed)), number]).permutation(self.num_batches)

    def keep_first(self, count, repeat=False):
        self.on_epoch_begin()
        super().keep_first(count, repeat)
        self.on_epoch_end()
        self._kept = True

    def iterator(self, number, start=0):
        self._stop()
        if self._kept:
            return iter(prefetched(self._dataset.skip(start)))
        adapter = self._adapter_of(self.order(number), start)
        compat.take_signature(adapter, self._adapter)
        self._adapter = adapter
        return iter(prefetched(shared(adapter.get_tf_dataset(), self._shard)))

    def _stop(self):
        """Ends the threads that read ahead in a pass that nobody goes on with."""
        if self._adapter.enqueuer is not None:
            self._adapter.enqueuer.stop()

    def catch_up(self, epochs):
        if type(self._inner).on_epoch_end is keras.utils.PyDataset.on_epoch_end:
            return
        for _ in range(epochs):
            self._inner.on_epoch_begin()
            self._inner.on_epoch_end()

    def facts(self):
        return {**super().facts(), "`shuffle`": self._shuffle}

    def reseed(self, seed):
        self._seed = seed

    def on_epoch_begin(self):
        if not self._kept:
            self._inner.on_epoch_begin()

    def on_epoch_end(self):
        if not self._kept:
            self._inner.on_epoch_end()


class _PyDatasetView(keras.utils.PyDataset):
    """Batches of a PyDataset in another order, from one of them on.

    Args:
        dataset: The PyDataset.
        order: Numbers of its batches, or None for all without end.
        start: Place in the order of the first batch.
    """

    def __init__(self, dataset, order, start):
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self._dataset = dataset
        self._order = order
        self._start = start

    @property
    def num_batches(self):
        return None if self._order is None else len(self._order) - self._start

    def __getitem__(self, index):
        index += self._start
        return self._dataset[index if self._order is None else int(self._order[index])]
