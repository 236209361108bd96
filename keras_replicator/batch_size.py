"""The largest global batch that fits into the memory of every replica.

batch_size = kr.find_batch_size(trainer, x, y)
trainer.fit(x, y, batch_size=batch_size)

Batches grow by doubling. The memory of the last two predicts which batch will still fit, so that
the search ends below the limit instead of beyond it; an allocation that fails nevertheless is
caught, and the search goes on between what fitted and what did not.
"""

import contextlib

import tensorflow as tf

from keras_replicator import memory
from keras_replicator.checks import check_positive
from keras_replicator.data.rows import count_rows
from keras_replicator.run_state import RunState

# Of the memory that a batch could have; the rest is for other batches, validation and callbacks.
_SHARE = 0.9
# The search ends when the next batch would be larger by less than this share.
_RESOLUTION = 1 / 16


def find_batch_size(
    trainer,
    x,
    y=None,
    sample_weight=None,
    *,
    start=None,
    maximum=None,
    memory_limit=None,
    verbose=1,
):
    """Returns the largest global batch whose training step fits into memory.

    Steps are really run, on growing batches made of the first rows of the data, repeated where they
    are too few. Afterwards weights, optimizers, metrics and random numbers are what they were.
    The size is agreed on by all replicas and workers: it fits everywhere. Choosing a learning rate
    for it is another matter: see `kr.callbacks.LearningRateWarmup`.

    On GPUs the peak of the device's allocator is compared with its limit; on CPUs the peak of the
    resident memory of the process with what the machine (or the container) has left.

    Args:
        trainer: A compiled `ReplicatedTrainer`.
        x: Arrays, or a data set, as in `fit`.
        y: Targets, with arrays only.
        sample_weight: Weights, with arrays only.
        start: Rows of the first global batch (default: one for each replica).
        maximum: Rows above which nothing is tried; default, the rows of the arrays, or 65,536.
        memory_limit: Bytes that a device (a process, on CPUs) may use; default, 90 % of what there
            is.
        verbose: 0 says nothing, 1 one line for each batch.

    Returns:
        Rows of a global batch, an int and a multiple of the number of replicas where it is larger.

    Raises:
        ValueError: When the trainer is not compiled, an argument is wrong, or not even the first
            batch fits.

    Example:

    >>> import keras, numpy as np
    >>> import keras_replicator as kr
    >>> trainer = kr.ReplicatedTrainer(
    ...     lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), devices=1
    ... )
    >>> trainer.compile(optimizer="sgd", loss="mse")
    >>> kr.find_batch_size(trainer, np.ones((48, 2)), np.ones((48, 1)), verbose=0)
    48
    """
    for name, value in (("start", start), ("maximum", maximum), ("memory_limit", memory_limit)):
        if value is not None:
            check_positive(name, value)
    session = trainer.session
    engine = session.engine
    if engine.asynchronous:
        raise ValueError(
            "find_batch_size looks at the memory of this machine, and under parameter servers "
            "steps run on the workers. Search on one worker's machine with "
            f"strategy='one_device'. Received: a trainer with strategy={session.plan.strategy!r}"
        )
    sample, spec, rows = trainer.sample_rows(x, y, sample_weight)
    replicas = engine.num_replicas
    maximum = maximum or rows or 65_536
    start = min(start or replicas, maximum)
    trial = _Trial(session, sample, spec, memory_limit)

    def fits(size):
        used = trial.run(size)
        fine = used is not None and used <= trial.limit
        fine = not engine.agree(0, not fine)[1]
        if verbose and session.plan.is_chief:
            amount = "out of memory" if used is None else f"{used / 1e9:.2f} GB"
            print(f"find_batch_size: {size} rows {'fit' if fine else 'do not fit'} ({amount})")
        return fine

    with trial:
        return _search(fits, trial.largest, start, maximum, replicas)


def _search(fits, predicted, start, maximum, replicas):
    """Grows and narrows a batch.

    Args:
        fits: Function of a number of rows.
        predicted: Function that returns the rows that should fit, as far as is known.
        start: First number of rows.
        maximum: Last one.
        replicas: Results are multiples of this where they are larger.

    Example:

    >>> _search(lambda size: size <= 100, lambda: None, 4, 4096, 4)
    96
    """
    good, bad, size = 0, None, start
    while fits_next(good, bad, size):
        if fits(size):
            good = size
        else:
            bad = size
        known = [maximum if bad is None else bad - 1, predicted() or maximum]
        size = min(2 * good if bad is None else (good + bad) // 2, *known)
        if size > replicas:
            size -= size % replicas if size != maximum else 0
    if good == 0:
        raise ValueError(
            f"Not even {start} row(s) fit into memory. Make the model smaller, use mixed precision "
            "(keras.config.set_dtype_policy('mixed_float16')) or more devices. "
            f"Received: start={start}"
        )
    return good


def fits_next(good, bad, size):
    """Whether a size is worth a trial: the first one, or larger than `good` by enough."""
    if good == 0:
        return bad is None
    return size > good and size - good >= _RESOLUTION * good


class _Trial:
    """Runs updates on batches of a wanted size, and puts everything back at the end."""

    def __init__(self, session, sample, spec, memory_limit):
        self._session = session
        self._phase = session.phases.get("train", spec)
        self._sample = sample
        self._devices = session.plan.devices
        self._measured = []
        available = memory.limit(self._devices)
        self.limit = memory_limit or int(_SHARE * available) if available else memory_limit
        self.limit = self.limit or float("inf")
        self._state = RunState(session.models.host, session.optimizers, session.engine)

    def __enter__(self):
        phase = self._phase
        totals = {} if phase.logs is None else phase.logs.totals()
        self._kept = self._state.collect(phase.window, totals)
        return self

    def __exit__(self, *error):
        self._state.restore(self._kept, self._phase.window, self._phase.logs)

    def run(self, size):
        """Returns the peak of memory in bytes, or None where an allocation failed."""
        batch = repeat_rows(self._sample, size, self._session.engine.shard)
        memory.reset_peak(self._devices)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._session.engine.named_losses())
            try:
                for position in range(self._session.window.size):
                    self._phase.loop.one((tf.constant(size), batch), position)
            except tf.errors.ResourceExhaustedError:
                if self._session.engine.num_workers > 1:
                    raise  # the other workers wait in a collective that will not come
                return None
        used = memory.peak(self._devices)
        self._measured.append((size, used))
        return used

    def largest(self):
        """Returns the rows that should fit on every worker, from a line through two sizes."""
        engine = self._session.engine
        mine = float("inf")
        if len(self._measured) > 1 and self.limit < float("inf"):
            (first, small), (last, large) = self._measured[-2:]
            slope = (large - small) / (last - first) if last > first else 0
            if slope > 0:
                mine = last + (self.limit - large) / slope
        if engine.num_workers > 1:
            caps = [0.0] * engine.num_workers
            caps[engine.worker] = min(mine, 2.0**40)
            mine = min(engine.sum_over_workers({"caps": caps})["caps"])
        return None if mine >= 2.0**40 else max(int(mine), 0)


def repeat_rows(sample, size, shard):
    """Returns this worker's part of a global batch, made of rows of a sample, again and again.

    Args:
        sample: A batch.
        size: Rows of the global batch.
        shard: The part of it that this worker drives.
    """
    begin, end = shard.rows(size)
    with tf.device("CPU:0"):
        where = tf.range(max(end - begin, 1)) % count_rows(sample)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else tf.gather(leaf, where), sample
        )
