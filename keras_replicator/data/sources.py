"""Anything that `fit` takes, as a stream of global batches in order.

    source = make_source(x, y, batch_size=64, shuffle=True, seed=0, shard=Shard())
    for epoch in range(epochs):
        iterator = source.iterator(epoch)        # a plain tf.data iterator
        ...
        source.on_epoch_end()

Arrays and the batches of a PyDataset are read by index, so that each worker touches its own rows
only and an epoch's order depends on nothing but `(seed, epoch)`. Everything else goes through
`tf.data` or Keras' own data adapters.
"""

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.adapters import AdapterSource
from keras_replicator.data.arrays import ArraySource
from keras_replicator.data.datasets import DatasetSource, OwnSource
from keras_replicator.data.distributed import (
    from_input_fn,
    is_input_fn,
    local_part,
    sharded_by_file,
    undistribute,
)
from keras_replicator.data.py_datasets import PyDatasetSource
from keras_replicator.data.seekable import SeekableSource
from keras_replicator.data.split import Shard


def make_source(
    x,
    y=None,
    sample_weight=None,
    *,
    batch_size=None,
    steps=None,
    shuffle=False,
    class_weight=None,
    seed=0,
    shard=Shard(),
    argument="x",
    strategy=None,
    exchange=None,
):
    """Wraps training, validation or prediction data.

    Args:
        x: What `keras.Model.fit` takes, a function of a `tf.distribute.InputContext` that returns
            a data set of per-replica batches, or a data set distributed by the strategy.
        y: Targets, with arrays only.
        sample_weight: Weights, with arrays only.
        batch_size: Rows of a global batch, with arrays only (default 32).
        steps: Steps per epoch, when the user gave them.
        shuffle: Whether arrays are shuffled each epoch.
        class_weight: Weights by class.
        seed: Seed of the shuffling.
        shard: The part of each global batch that this worker reads.
        argument: Name of the argument, for messages.
        strategy: The strategy, for data sets that it has distributed.
        exchange: `exchange(topic, facts)` returns the facts of every worker, in order; or None on
            one machine.

    Returns:
        A `Source`.

    Raises:
        ValueError: For an empty data set, mismatched row counts or a bad batch size.
    """
    if batch_size is not None and (not isinstance(batch_size, (int, np.integer)) or batch_size < 1):
        raise ValueError(
            "`batch_size` is the number of rows of a global batch and must be an int of at least "
            f"1. Received: batch_size={batch_size}"
        )
    is_distributed = isinstance(
        x, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)
    )
    own = None
    if is_distributed:
        own = "the batches that the strategy's data set has for it"
        x = undistribute(x, strategy) if shard.is_whole else local_part(x, shard.count, argument)
    elif is_input_fn(x):
        own = "what its input function gives"
        x = from_input_fn(x, shard)
    if isinstance(x, tf.data.Dataset):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"`{name}` must not be given when `{argument}` is a tf.data.Dataset: its "
                    f"elements hold it. Received: {name}={value}"
                )
        if own is None and not shard.is_whole and compat.shards_by_file(x):
            own, x = sharded_by_file(x, shard, exchange)
        if own is not None and not shard.is_whole:
            return OwnSource(x, shard, class_weight, exchange, own, argument)
        source = DatasetSource(x, shard, class_weight)
        if own is not None and not is_distributed:
            source.made_for = f"{shard.total} replicas"
        return source
    if isinstance(x, keras.utils.PyDataset):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"`{name}` must not be given when `{argument}` is a PyDataset: its batches "
                    f"hold it. Received: {name}={value}"
                )
        return PyDatasetSource(x, shuffle, seed, shard, class_weight)
    if is_seekable(x):
        return SeekableSource(x, shard)
    try:
        adapter = compat.adapter_for(
            x,
            y,
            sample_weight,
            batch_size=None if batch_size is None else int(batch_size),
            steps=steps,
            shuffle=shuffle and not _warns_about_shuffle(x),
            class_weight=class_weight,
        )
    except ValueError as error:
        if argument == "x":
            raise
        raise ValueError(f"`{argument}` cannot be read. {error}") from error
    if compat.is_array_adapter(adapter):
        arrays = compat.to_sliceable(compat.array_adapter_inputs(adapter))
        if _dense(arrays):
            return ArraySource(arrays, adapter.batch_size, shuffle, seed, shard, argument)
    return AdapterSource(adapter, shard, argument)


def _warns_about_shuffle(x):
    """Keras warns when `shuffle`, which is True by default, meets data that shuffle themselves."""
    return not _is_array_like(x)


def is_seekable(x):
    """Whether an iterator of batches can be set to a place: `x.seek(batch)`."""
    return hasattr(x, "__next__") and callable(getattr(x, "seek", None))


def _is_array_like(x):
    return all(
        leaf is None or hasattr(leaf, "shape") or hasattr(leaf, "__array__")
        for leaf in keras.tree.flatten(x)
    )


def _dense(arrays):
    return all(
        leaf is None or isinstance(leaf, np.ndarray) or isinstance(leaf, tf.Tensor)
        for leaf in keras.tree.flatten(arrays)
    )
