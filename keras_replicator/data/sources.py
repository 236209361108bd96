"""Anything that `fit` takes, as a stream of global batches in order.

    source = make_source(x, y, batch_size=64, shuffle=True, seed=0, shard=Shard())
    for epoch in range(epochs):
        iterator = source.iterator(epoch)        # a plain tf.data iterator
        ...
        source.on_epoch_end()

An element is `(rows, batch)`: the rows of the *global* batch and this worker's part of it. Arrays
are read by index, so that each worker touches its own rows only and an epoch's order depends on
nothing but `(seed, epoch)`; so are the batches of a PyDataset. Everything else goes through Keras'
own data adapters. Of several workers each reads the same batches, keeps its rows, and adds marks of
what it read as a third part of the element (`fingerprint.py`); or each reads batches of its own
(`own.py`).
"""

import inspect
import itertools

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.data.fingerprint import marks_of
from keras_replicator.data.own import join_batches, own_batches, rows_of_first
from keras_replicator.data.places import Passes, place_of, read_up_to, set_place
from keras_replicator.data.rows import at_least_one, count_rows, slice_rows
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
        x = _undistribute(x, strategy) if shard.is_whole else _local_part(x, shard.count, argument)
    elif _is_input_fn(x):
        own = "what its input function gives"
        x = _from_input_fn(x, shard)
    if isinstance(x, tf.data.Dataset):
        for name, value in (("y", y), ("sample_weight", sample_weight)):
            if value is not None:
                raise ValueError(
                    f"`{name}` must not be given when `{argument}` is a tf.data.Dataset: its "
                    f"elements hold it. Received: {name}={value}"
                )
        if own is None and not shard.is_whole and compat.shards_by_file(x):
            own, x = _files(x, shard, exchange)
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


def _is_input_fn(x):
    return (inspect.isfunction(x) or inspect.ismethod(x)) and not inspect.isgeneratorfunction(x)


def _dense(arrays):
    return all(
        leaf is None or isinstance(leaf, np.ndarray) or isinstance(leaf, tf.Tensor)
        for leaf in keras.tree.flatten(arrays)
    )


class Source:
    """A stream of global batches, one pass after the other.

    Attributes:
        num_batches: Batches of a pass, or None where that is not known.
        element_spec: The `tf.TypeSpec` nest of `(rows, batch)`.
        can_seek: Whether a pass can start at any batch without reading those before.
        is_counted: Whether an iterator is known to hold `num_batches` batches, or never to end.
        one_pass: Whether the data can be read once only, as a generator.
        made_for: What the batches depend on; a place in them holds for the same only.
        kind: What the user calls these data.
    """

    num_batches = None
    can_seek = False
    _dataset = None
    is_counted = False
    one_pass = False
    # How the rows are spread over workers, as the end of "each worker reads …".
    sharding = "every batch, in the same order, and keeps its rows"
    made_for = ""
    kind = "data"

    def iterator(self, number, start=0):
        """Returns a `tf.data` iterator over the batches of a pass, from batch `start` on."""
        raise NotImplementedError

    def keep_first(self, count, repeat=False):
        """Makes an epoch of the first `count` batches, read once and the same in every epoch.

        Args:
            count: How many batches.
            repeat: Whether they come again and again, for epochs of more steps.
        """
        dataset = self._dataset.take(count).cache()
        found = sum(1 for _ in dataset)
        self.num_batches = None if repeat else found
        self._dataset = dataset.repeat() if repeat else dataset

    def resume(self, number, start, passes, place=None):
        """Returns the iterator of a run that goes on.

        Args:
            number: Number of the pass.
            start: Batches of this pass that have been consumed.
            passes: How many passes had begun before this one.
            place: What `place` returned, or None.

        Raises:
            CheckpointError: When the place does not fit these data.
        """
        del passes, place
        return self.iterator(number, start)

    def place(self, iterator):
        """Returns the place of an iterator, a dict of tensors, where it can be saved; else None."""
        del iterator

    def catch_up(self, epochs):
        """Tells data that change from epoch to epoch how many epochs lie behind."""

    def check_resume(self):
        """Raises `ValueError` when a run on these data can never be resumed."""

    def facts(self):
        """Returns what must be alike when a run goes on in the middle of these data."""
        return {"the data": self.kind}

    def describe(self, plan):
        """Returns the lines that `print(trainer.plan)` shows about the batches."""
        return {
            "global batch": "as the data set gives it, split in order over replicas",
            **self._describe_sharding(plan),
        }

    def _describe_sharding(self, plan):
        return {"sharding": f"each worker reads {self.sharding}"} if plan.num_workers > 1 else {}

    def reseed(self, seed):
        """Takes the seed of a run that is resumed."""

    def on_epoch_begin(self):
        """Tells the data that an epoch begins."""

    def on_epoch_end(self):
        """Tells the data that an epoch has ended."""


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

        def read(number):
            first = number * self.batch_size
            rows = tf.minimum(self.num_rows - first, self.batch_size)
            begin, end = 0, rows
            if not shard.is_whole:
                begin, end = at_least_one(*shard.rows(rows), rows)
            if self._shuffle:
                where = self._order[first + begin : first + end]
                batch = keras.tree.map_structure(
                    lambda leaf: None if leaf is None else tf.gather(leaf, where), tensors
                )
            else:
                batch = keras.tree.map_structure(
                    lambda leaf: None if leaf is None else leaf[first + begin : first + end],
                    tensors,
                )
            return tf.cast(rows, tf.int32), batch

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
        return iter(_prefetched(dataset))


class DatasetSource(Source):
    """A `tf.data.Dataset` whose elements are global batches."""

    kind = "a tf.data.Dataset"

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
        self._dataset = _shared(dataset, shard)
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
        iterator = iter(_prefetched(self._dataset.skip(start) if start else self._dataset))
        self._beginning = self._place_of(iterator)
        return iterator

    def resume(self, number, start, passes, place=None):
        if place:
            iterator = self.iterator(number)
            set_place(iterator, place["now"])
            if not self._is_endless:
                # Restoring took seeds of the data set's shuffles: give back those of later passes.
                set_place(iter(_prefetched(self._dataset)), place["beginning"])
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
        return iter(_prefetched(self._dataset.skip(start) if start else self._dataset))

    def resume(self, number, start, passes, place=None):
        self._passes.begin_again(self._own, passes)
        iterator = self.iterator(number)
        if start:
            read_up_to(iterator, start, self.kind, None, self._is_chief)
        return iterator


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
        self._dataset = _shared(adapter.get_tf_dataset(), shard)
        self.element_spec = self._dataset.element_spec
        self._fresh = True
        self._kept = False

    def iterator(self, number, start=0):
        # An adapter's data set carries the order of its epoch, so each epoch takes a new one.
        as_it_is = self._fresh or self._kept
        dataset = (
            self._dataset if as_it_is else _shared(self._adapter.get_tf_dataset(), self._shard)
        )
        self._fresh = False
        return iter(_prefetched(dataset.skip(start) if start else dataset))

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
        self._dataset = _shared(self._adapter.get_tf_dataset(), shard)
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
            return iter(_prefetched(self._dataset.skip(start)))
        adapter = self._adapter_of(self.order(number), start)
        compat.take_signature(adapter, self._adapter)
        self._adapter = adapter
        return iter(_prefetched(_shared(adapter.get_tf_dataset(), self._shard)))

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
        return _shared(self._adapter.get_tf_dataset(), self._shard)

    def keep_first(self, count, repeat=False):
        super().keep_first(count, repeat)
        self._kept = True

    def iterator(self, number, start=0):
        dataset = self._dataset.skip(start) if self._kept else self._from(start)
        return iter(_prefetched(dataset))


def _shared(dataset, shard):
    """Maps elements to `(rows, batch)`: the global batch's rows and this worker's part of it."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def take_share(*element):
        batch = element if is_tuple else element[0]
        rows = count_rows(batch)
        if shard.is_whole:
            return rows, batch
        return rows, slice_rows(batch, *at_least_one(*shard.rows(rows), rows)), marks_of(batch)

    return dataset.map(take_share)


def _prefetched(dataset):
    options = tf.data.Options()
    # Nobody distributes these data sets again: no sharding policy, no line about one.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)


def _from_input_fn(input_fn, shard):
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


def _local_part(distributed, count, argument):
    """Returns this worker's batches of a data set that was distributed over workers."""
    dataset = compat.local_dataset(distributed)
    if dataset is None:
        raise ValueError(
            f"`{argument}` is an iterator over a distributed data set, which can be read once and "
            "on one machine only. Pass the data set itself. Received: "
            f"{argument}={type(distributed).__name__}"
        )
    return join_batches(dataset, count)


def _files(dataset, shard, exchange):
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


def _undistribute(distributed, strategy):
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
