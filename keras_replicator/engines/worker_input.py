"""Data that each worker of an asynchronous job reads by itself.

    def input_fn(context):                     # a tf.distribute.InputContext
        files = tf.data.Dataset.list_files("data/*", seed=0)
        files = files.shard(context.num_input_pipelines, context.input_pipeline_id)
        return tf.data.TFRecordDataset(files).map(parse).repeat().shuffle(1000).batch(64)

    trainer.fit(input_fn, steps_per_epoch=1000)

The function is called once for each worker; its data set runs in that worker, and a step takes the
next batch of whichever worker runs it. So the data must not end.
"""

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.rows import count_rows
from keras_replicator.data.source import Source


class WorkerSource(Source):
    """The batches that an input function gives on each worker.

    Args:
        input_fn: Function of a `tf.distribute.InputContext` that returns a `tf.data.Dataset` of
            batches without an end.
        coordinator: The `ClusterCoordinator`.
        workers: Number of workers.
        steps: Steps of an epoch.

    Raises:
        ValueError: When the steps are not given, or the data end.
    """

    def __init__(self, input_fn, coordinator, workers, steps):
        if steps is None:
            raise ValueError(
                "`steps_per_epoch` must be given with an input function under parameter servers: "
                "each worker reads data of its own, which do not end. "
                f"Received: x={input_fn!r}, steps_per_epoch=None"
            )
        self._coordinator = coordinator
        self._functions = [
            _dataset_function(input_fn, number, workers) for number in range(workers)
        ]
        spec = self._functions[0].structured_outputs.element_spec
        self.element_spec = (tf.TensorSpec([], tf.int32), spec)

    def iterator(self, epoch, start=0):
        """Returns `WorkerIterators` that begin anew on each worker."""
        del epoch, start
        return WorkerIterators(
            compat.worker_iterators(self._coordinator, self._functions), self.element_spec
        )

    def keep_first(self, count, repeat=False):
        raise ValueError(
            "`overfit_batches` needs data that the chief reads, and an input function gives each "
            f"worker its own. Pass a tf.data.Dataset. Received: overfit_batches={count}"
        )

    def describe(self, plan):
        del plan
        return {"global batch": "as the input function gives it; each worker reads its own data"}


class WorkerIterators:
    """One iterator on each worker, in the place of the chief's.

    Attributes:
        values: What a scheduled function takes as its iterator.
        element_spec: The element spec of `(rows, batch)`.
    """

    def __init__(self, values, element_spec):
        self.values = values
        self.element_spec = element_spec

    @property
    def spec(self):
        """The type of the iterator that a worker's function gets."""
        return tf.data.IteratorSpec(self.element_spec[1])


def next_element(iterator):
    """Returns `(rows, batch)` of an iterator on this worker."""
    batch = next(iterator)
    return count_rows(batch), batch


def _dataset_function(input_fn, number, workers):
    context = tf.distribute.InputContext(
        num_input_pipelines=workers, input_pipeline_id=number, num_replicas_in_sync=1
    )

    def make():
        dataset = input_fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                "An input function takes a tf.distribute.InputContext and must return a "
                f"tf.data.Dataset of batches. Received: {type(dataset).__name__}"
            )
        return dataset

    found = int(make().cardinality())
    if found >= 0:
        raise ValueError(
            f"The data set of an input function ends after {found} batches, and under parameter "
            "servers workers read as much as they get to: it must not end. Add `.repeat()` to it, "
            "or pass a tf.data.Dataset, which the chief reads once an epoch for all workers. "
            f"Received: a data set of cardinality {found} for worker {number}"
        )
    return compat.compiled(make).get_concrete_function()
