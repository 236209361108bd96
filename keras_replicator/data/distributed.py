"""Data that are made for replicas or workers: input functions, distributed data sets, files."""

import inspect
import itertools

import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.own import join_batches, rows_of_first


def is_input_fn(x):
    """Whether data are a function of an `InputContext`."""
    return (inspect.isfunction(x) or inspect.ismethod(x)) and not inspect.isgeneratorfunction(x)


def from_input_fn(input_fn, shard):
    """Turns per-replica batches of an input function into global batches, in order."""
    context = tf.distribute.InputContext(
        num_input_pipelines=shard.total // shard.count,
        input_pipeline_id=shard.first // shard.count,
        num_replicas_in_sync=shard.total,
    )
    dataset = input_fn(context)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "An input function takes a tf.distribute.InputContext and must return a "
            f"tf.data.Dataset of per-replica batches. Received: {type(dataset).__name__}"
        )
    if shard.is_whole and not rows_of_first(dataset):
        raise ValueError("The input function returned a data set without batches.")
    return join_batches(dataset, shard.count)


def local_part(distributed, count, argument):
    """Returns this worker's batches of a data set that was distributed over workers."""
    dataset = compat.local_dataset(distributed)
    if dataset is None:
        raise ValueError(
            f"`{argument}` is an iterator over a distributed data set, which can be read once and "
            "on one machine only. Pass the data set itself. Received: "
            f"{argument}={type(distributed).__name__}"
        )
    return join_batches(dataset, count)


def sharded_by_file(dataset, shard, exchange):
    """Shards a data set by files, where its options ask for that and there are enough.

    Returns:
        `(how, dataset)`; how is None where every worker reads everything.
    """
    workers = shard.total // shard.count
    worker = shard.first // shard.count
    part, rows = compat.shard_by_file(dataset, workers, worker), 0
    try:
        rows = rows_of_first(part)
    except tf.errors.OpError:
        part = None
    everyone = exchange("the files of each worker", {"files": part is not None, "rows": rows})
    if not all(facts["files"] for facts in everyone):
        return None, dataset
    begin, end = shard.rows(max(facts["rows"] for facts in everyone))
    return "its files, and makes batches of its share of the rows", part.rebatch(
        max(end - begin, 1)
    )


def undistribute(distributed, strategy):
    """Reads a distributed data set as global batches: the replicas' parts, joined in order."""

    is_iterator = isinstance(distributed, tf.distribute.DistributedIterator)
    first = next(iter(distributed))

    def generate():
        # An iterator has given out its first element for good.
        rest = itertools.chain([first], distributed) if is_iterator else distributed
        for element in rest:
            yield _join(strategy, element)

    spec = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype),
        _join(strategy, first),
    )
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def _join(strategy, element):
    parts = strategy.experimental_local_results(element)
    return tf.nest.map_structure(lambda *leaves: tf.concat(leaves, axis=0), *parts)
