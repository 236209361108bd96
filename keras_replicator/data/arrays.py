"""Arrays in memory, read by index."""

import keras
import numpy as np
import tensorflow as tf

from keras_replicator.data.rows import at_least_one
from keras_replicator.data.source import Source, prefetched


class ArraySource(Source):
    """Arrays in memory, read by index; the order of an epoch is a function of (seed, epoch)."""

    can_seek = True
    is_counted = True
    sharding = "its rows of every batch, by index"
    kind = "arrays"

    def __init__(self, arrays, batch_size, shuffle, seed, shard, argument="x"):
        leaves = [leaf for leaf in keras.tree.flatten(arrays) if leaf is not None]
        self.num_rows = int(leaves[0].shape[0])
        if self.num_rows == 0:
            raise ValueError(
                f"`{argument}` holds no rows. Received: `{argument}` of shape {leaves[0].shape}"
            )
        self.batch_size = int(batch_size)
        self.num_batches = -(-self.num_rows // self.batch_size)
        self._shuffle = shuffle
        self._seed = seed
        with tf.init_scope(), tf.device("CPU:0"):
            self._order = tf.Variable(
                np.arange(self.num_rows), dtype=tf.int64, trainable=False, name="order"
            )
        self._epoch = None
        self._dataset = self._make_dataset(arrays, shard)
        self.element_spec = self._dataset.element_spec

    def _make_dataset(self, arrays, shard):
        with tf.device("CPU:0"):
            tensors = keras.tree.map_structure(
                lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf),
                keras.tree.lists_to_tuples(arrays),
            )

        # Without a partial batch the shapes are known, which makes a step cheaper. Not on several
        # workers: their parts may differ by a row, and all must run the same step.
        are_known = shard.is_whole and self.num_rows % self.batch_size == 0
        size = self.batch_size if are_known else None

        def read(number):
            first = number * self.batch_size
            rows = tf.minimum(self.num_rows - first, self.batch_size)
            begin, end = 0, self.batch_size if are_known else rows
            if not shard.is_whole:
                begin, end = at_least_one(*shard.rows(rows), rows)
            where = self._order[first + begin : first + end] if self._shuffle else None

            def take(leaf):
                if leaf is None:
                    return None
                part = (
                    leaf[first + begin : first + end] if where is None else tf.gather(leaf, where)
                )
                return tf.ensure_shape(part, [size, *leaf.shape[1:]])

            return tf.cast(rows, tf.int32), keras.tree.map_structure(take, tensors)

        dataset = tf.data.Dataset.range(self.num_batches)
        self._read = read
        return dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def describe(self, plan):
        rows = min(self.batch_size, self.num_rows)
        return {
            "global batch": f"{rows} rows",
            "rows per replica": ", ".join(map(str, plan.rows_per_replica(rows))),
            **self._describe_sharding(plan),
        }

    def facts(self):
        return {
            **super().facts(),
            "the number of rows": self.num_rows,
            "the batch size": self.batch_size,
            "`shuffle`": self._shuffle,
        }

    def reseed(self, seed):
        if seed != self._seed:
            self._seed, self._epoch = seed, None

    def order(self, epoch):
        """Returns the order of rows in an epoch, an int64 array."""
        if not self._shuffle:
            return np.arange(self.num_rows)
        generator = np.random.default_rng([abs(int(self._seed)), epoch])
        if self._shuffle == "batch":
            batches = np.array_split(
                np.arange(self.num_rows), range(self.batch_size, self.num_rows, self.batch_size)
            )
            full = len(batches) - (self.num_rows % self.batch_size > 0)
            shuffled = [batches[i] for i in generator.permutation(full)] + batches[full:]
            return np.concatenate(shuffled)
        return generator.permutation(self.num_rows)

    def iterator(self, epoch, start=0):
        if self._shuffle and epoch != self._epoch:
            self._order.assign(self.order(epoch))
            self._epoch = epoch
        dataset = self._dataset
        if start and self.num_batches is None:
            dataset = dataset.skip(start)
        elif start:
            remaining = tf.data.Dataset.range(start, self.num_batches)
            dataset = remaining.map(
                self._read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
            )
        return iter(prefetched(dataset))
