"""`tf.data` data sets: of global batches, or of batches of each worker's own."""

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.own import own_batches
from keras_replicator.data.places import Passes, place_of, read_up_to, set_place
from keras_replicator.data.source import Source, prefetched, shared


class DatasetSource(Source):
    """A `tf.data.Dataset` whose elements are global batches."""

    kind = "a tf.data.Dataset"
    is_tuned = True

    def __init__(self, dataset, shard, class_weight=None):
        if class_weight is not None:
            dataset = dataset.map(compat.class_weight_map(class_weight))
        cardinality = int(dataset.cardinality())
        if cardinality == 0:
            raise ValueError(
                "The data set holds no batches. Received: a tf.data.Dataset of cardinality 0"
            )
        self.num_batches = cardinality if cardinality > 0 else None
        self.is_counted = cardinality > 0 or cardinality == tf.data.INFINITE_CARDINALITY
        self._dataset = shared(dataset, shard)
        self._is_chief = shard.first == 0
        self._is_endless = cardinality == tf.data.INFINITE_CARDINALITY
        self._passes = Passes(dataset, self._is_endless)
        # Why there is no place to save, once that is known; and the place where a pass began.
        self._why_not = self._passes.why_not
        if not shard.is_whole:
            self._why_not = "each of several workers keeps its own rows"
        self._beginning = None
        self.element_spec = self._dataset.element_spec

    def iterator(self, number, start=0):
        dataset = self._dataset.skip(start) if start else self._dataset
        iterator = iter(prefetched(dataset, self.is_tuned))
        self._beginning = self._place_of(iterator)
        return iterator

    def resume(self, number, start, passes, place=None):
        if place:
            iterator = self.iterator(number)
            set_place(iterator, place["now"])
            if not self._is_endless:
                # Restoring took seeds of the data set's shuffles: give back those of later passes.
                set_place(iter(prefetched(self._dataset, self.is_tuned)), place["beginning"])
            self._beginning = place["beginning"]
            return iterator
        self._passes.begin_again(self._dataset, passes)
        iterator = self.iterator(number)
        if start:
            read_up_to(iterator, start, self.kind, self._why_not, self._is_chief)
        return iterator

    def place(self, iterator):
        place = self._place_of(iterator)
        if place is None or self._beginning is None:
            return None
        return {"now": place, "beginning": self._beginning}

    def _place_of(self, iterator):
        if self._why_not is None:
            place, self._why_not = place_of(iterator)
            return place
        return None


class OwnSource(Source):
    """A `tf.data.Dataset` of batches that belong to this worker; the others have their own."""

    kind = "batches of each worker's own"
    is_tuned = True

    def __init__(self, dataset, shard, class_weight, exchange, sharding, argument="x"):
        if class_weight is not None:
            dataset = dataset.map(compat.class_weight_map(class_weight))
        self.sharding = sharding
        self._workers = shard.total // shard.count
        self._is_chief = shard.first == 0
        self._passes = Passes(dataset)
        self._dataset, self.num_batches = own_batches(dataset, shard, exchange, argument)
        self._own = dataset
        self.element_spec = self._dataset.element_spec

    def describe(self, plan):
        return {
            "global batch": "the batches of all workers together",
            **self._describe_sharding(plan),
        }

    def facts(self):
        return {**super().facts(), "the number of workers": self._workers}

    def iterator(self, number, start=0):
        dataset = self._dataset.skip(start) if start else self._dataset
        return iter(prefetched(dataset, self.is_tuned))

    def resume(self, number, start, passes, place=None):
        self._passes.begin_again(self._own, passes)
        iterator = self.iterator(number)
        if start:
            read_up_to(iterator, start, self.kind, None, self._is_chief)
        return iterator
