"""Batches that each worker reads for itself: input functions, distributed data sets, files.

An element is `(rows, batch)` with the rows of each replica of this worker. A worker whose data have
ended goes on with one row that counts nothing, for as long as another one has rows; the compiled
loop adds the rows of all workers up before each step, and ends when there are none. So no worker
waits for another one, and no row is lost, however unevenly the data are spread.
"""

import tensorflow as tf

from keras_replicator.data.rows import count_rows, slice_rows
from keras_replicator.data.split import boundary


def counts_own_rows(spec):
    """Whether the elements of a spec are those of `own_batches`."""
    return spec[0].shape.rank == 1


def join_batches(dataset, count):
    """Joins `count` consecutive batches to one, with the rows of the first batch as their size.

    Args:
        dataset: A `tf.data.Dataset` of batches.
        count: How many batches make one.
    """
    rows = rows_of_first(dataset)
    return dataset if count == 1 or not rows else dataset.unbatch().batch(rows * count)


def rows_of_first(dataset):
    """Returns the rows of the first batch of a data set, 0 where there is none."""
    for element in dataset.take(1):
        return int(count_rows(element))
    return 0


def own_batches(dataset, shard, exchange, argument="x"):
    """Prepares the data set of one worker.

    Args:
        dataset: A `tf.data.Dataset` of this worker's batches: each is split over its replicas.
        shard: The replicas of this worker.
        exchange: `exchange(topic, facts)` returns the facts of every worker, in order.
        argument: Name of the argument, for messages.

    Returns:
        `(endless data set of (rows, batch), batches of the longest worker or None)`.

    Raises:
        ValueError: When no worker has a batch.
    """
    first = next(iter(dataset.take(1)), None)
    everyone = exchange(
        "the batches of each worker",
        {
            "shapes": None if first is None else _shapes(first),
            "batches": int(dataset.cardinality()),
        },
    )
    shapes = [facts["shapes"] for facts in everyone if facts["shapes"] is not None]
    if not shapes:
        raise ValueError(
            f"No worker has a batch. `{argument}` must give at least one worker a batch of at "
            f"least one row. Received: {argument} of {len(everyone)} workers, all empty"
        )
    blank = _blank(dataset.element_spec, shapes[0], argument) if first is None else _one_row(first)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def count(*element):
        batch = element if is_tuple else element[0]
        rows, parts = count_rows(batch), shard.count
        cuts = [boundary(rows, part, parts) for part in range(parts + 1)]
        return tf.stack([end - begin for begin, end in zip(cuts, cuts[1:])]), batch

    nothing = tf.data.Dataset.from_tensors((tf.zeros([shard.count], tf.int32), blank))
    batches = [facts["batches"] for facts in everyone]
    return (
        dataset.map(count).concatenate(nothing.repeat()),
        max(batches) if min(batches) >= 0 else None,
    )


def _one_row(element):
    return slice_rows(element, 0, 1)


def _shapes(element):
    """The shape of a row of each leaf; None for what is not dense."""
    return [
        leaf.shape.as_list()[1:] if isinstance(leaf, tf.Tensor) else None
        for leaf in tf.nest.flatten(element)
    ]


def _blank(spec, shapes, argument):
    """One row of zeros for a worker that has no row to take as an example."""

    def blank(leaf, shape):
        if not isinstance(leaf, tf.TensorSpec):
            raise ValueError(
                f"This worker has no batch at all, and `{argument}` holds tensors that are not "
                "dense, so that it cannot stand in for one. Give every worker at least one batch. "
                f"Received: {leaf}"
            )
        if leaf.dtype == tf.string:
            return tf.fill([1, *shape], "")
        return tf.zeros([1, *shape], leaf.dtype)

    leaves = [blank(leaf, shape) for leaf, shape in zip(tf.nest.flatten(spec), shapes)]
    return tf.nest.pack_sequence_as(spec, leaves)
