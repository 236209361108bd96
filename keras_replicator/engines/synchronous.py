"""Synchronous training: one device, several devices of one machine, several workers, a TPU.

A step runs once per replica on its rows of the global batch; one compiled function runs many
steps a call. With one replica there is no strategy at all.
"""

import contextlib

import keras
import tensorflow as tf

from keras_replicator import compat, placement, replica
from keras_replicator.data.rows import (
    at_least_one,
    check_equal_rows,
    count_rows,
    drop_optionals,
    slice_rows,
    with_static_rows,
)
from keras_replicator.data.split import Shard
from keras_replicator.engines.joined import JoinedEngine
from keras_replicator.engines.loops import Loop
from keras_replicator.steps.optimizers import GradientWindow


class SynchronousEngine(JoinedEngine):
    """Steps under `tf.distribute`, or under no strategy where there is one replica.

    Args:
        strategy: The strategy, or None.
        device: Name of the device of a single replica, or None for TensorFlow's choice.
        worker: Number of this worker.
        num_workers: Workers of the job.
        cluster: The `Cluster` of the job, or None.
        watch: The `Watch` over the other workers, or None.
        start_timeout: Seconds that a worker waits for what another one has to tell.
        groups: Names of the logical devices of each replica of this worker, or nothing.
    """

    times_steps = True

    def __init__(
        self,
        strategy=None,
        device=None,
        worker=0,
        num_workers=1,
        cluster=None,
        watch=None,
        start_timeout=600,
        groups=(),
    ):
        super().__init__(worker, num_workers, cluster, watch, start_timeout)
        self.groups = groups
        self.strategy = strategy
        self.device = device
        self.num_replicas = 1 if strategy is None else strategy.num_replicas_in_sync
        count = self.num_replicas // num_workers
        self.shard = Shard(worker * count, count, self.num_replicas)
        self.makes_anew = self.num_replicas > 1
        self.sync_batch_norm = False
        self._runs = {}
        self._calls = 0

    @contextlib.contextmanager
    def scope(self):
        outer = tf.distribute.get_strategy() if tf.distribute.has_strategy() else self.strategy
        if outer is not self.strategy:
            raise RuntimeError(
                "The trainer was used inside of the scope of another strategy. Leave the scope "
                "(the trainer enters its own), or pass that strategy: "
                "ReplicatedTrainer(model, strategy=strategy). "
                f"Received: the scope of a {type(outer).__name__}"
            )
        place = self._place if self.groups else None
        with self._placement(), placement.placing(place), replica.building_with(self.groups):
            if self.strategy is None or tf.distribute.get_strategy() is self.strategy:
                yield
            else:
                with self.strategy.scope():
                    yield

    @contextlib.contextmanager
    def recording(self, made):
        def note(next_creator, **kwargs):
            made.append(next_creator(**kwargs))
            return made[-1]

        with (
            self.scope(),
            compat.local_initial_values(self.strategy),
            tf.variable_creator_scope(note),
        ):
            yield

    def _place(self, variable, value, like):
        """Makes a variable on the logical device whose context is open, or beside `like`."""
        if isinstance(like, keras.Variable):
            names = compat.short_devices_of(like)
        else:
            index = placement.pinned_to(variable)
            index = (replica.building_on() or 0) if index is None else index
            names = [group[index] for group in self.groups]
        with contextlib.ExitStack() as stack:
            if self.strategy is None:
                stack.enter_context(tf.device(names[0]))
            else:
                stack.enter_context(compat.mirrored_on(self.strategy, names))
            placement.make(variable, value)

    def _placement(self):
        if self.strategy is None and self.device is not None:
            return tf.device(self.device)
        return contextlib.nullcontext()

    # ------------------------------------------------------------------------------- one step

    def replicate(self, fn, batch=None, rows=None, window=None, scratch=None, exact=False):
        """Runs `fn(replica_batch)` on each replica of this worker.

        Args:
            fn: Function of a batch (of nothing, where `batch` is None).
            batch: This worker's part of a global batch.
            rows: Rows of the global batch, or those of each replica of the job.
            window: Where gradients are accumulated, or None.
            scratch: Entries for `Replica.scratch`.
            exact: Whether a replica without rows gets an empty batch.

        Returns:
            A list with the outputs of this worker's replicas, in order.
        """

        self._calls += 1
        call = self._calls

        def on_replica():
            if self.strategy is None:
                index = 0
            else:
                index = compat.static_replica_id(tf.distribute.get_replica_context())
            part, part_rows = self._part(batch, rows, index, exact)
            current = replica.Replica(
                index=index,
                num_replicas=self.num_replicas,
                strategy=self.strategy,
                rows=part_rows,
                total_rows=None if rows is None else tf.reduce_sum(rows),
                sync_batch_norm=self.sync_batch_norm,
                window=window,
                several_workers=self.num_workers > 1,
                call=call,
                devices=self.groups[index - self.shard.first] if self.groups else (),
            )
            current.scratch.update(scratch or {})
            # A profile shows operations by these names; on a TPU only a tensor knows the number.
            name = f"replica_{index}/" if isinstance(index, int) else "replica"
            with replica.activate(current), tf.name_scope(name):
                return fn() if batch is None else fn(part)

        if self.strategy is None:
            with self._placement():
                return [on_replica()]
        with _named_mismatch():
            outputs = self.strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        return local_results(self.strategy, outputs)

    def _part(self, batch, rows, index, exact):
        """Returns `(batch, rows)` of one replica.

        A replica without rows gets one row that counts nothing (unless `exact`): layers and
        losses need not cope with empty tensors.
        """
        if batch is None or rows is None:
            return batch, rows
        if self.num_replicas == 1:
            return drop_optionals(batch), rows
        if rows.shape.rank == 0:
            known = tf.get_static_value(rows)
            begin, end = self.shard.replica_rows(rows if known is None else int(known), index)
        else:
            begin = tf.reduce_sum(rows[self.shard.first : index])
            end = begin + rows[index]
        with tf.device("CPU:0"):
            own = end - begin
            if not exact:
                begin, end = at_least_one(begin, end, count_rows(batch))
            part = slice_rows(batch, begin, end)
        return part, tf.convert_to_tensor(own)

    # --------------------------------------------------------------------------- the interface

    def owns(self, variable):
        return not self.makes_anew or compat.strategy_of(variable) is self.strategy

    def make_window(self, steps):
        return GradientWindow(steps, self.scope)

    def build(self, step, element_spec, window=None):
        def trace(element):
            rows, batch = tf.reduce_sum(element[0]), element[1]
            current = replica.Replica(rows=rows, total_rows=rows, building=True, window=window)
            with contextlib.ExitStack() as stack:
                if self.strategy is not None:
                    # A replica of this worker: variables have copies of no other.
                    own = tf.distribute.ReplicaContext(self.strategy, self.shard.first)
                    stack.enter_context(own)
                stack.enter_context(replica.activate(current))
                step(drop_optionals(batch))

        with self.scope():
            compat.compiled(trace).get_concrete_function(element_spec)

    def make_loop(self, step, **options):
        return Loop(self, step, **options)

    def run(self, fn, inputs, run_eagerly=False):
        per_replica = [isinstance(value, replica.PerReplica) for value in inputs]
        for value in inputs:
            if isinstance(value, replica.PerReplica) and len(value.values) != self.shard.count:
                raise ValueError(
                    f"kr.PerReplica must hold one value for each of the {self.shard.count} "
                    f"replicas of this worker. Received: {len(value.values)} values"
                )
        plain = [
            [tf.nest.map_structure(tf.convert_to_tensor, part) for part in value.values]
            if own
            else tf.nest.map_structure(tf.convert_to_tensor, value)
            for value, own in zip(inputs, per_replica)
        ]
        check_equal_rows([value for value, own in zip(plain, per_replica) if not own])
        key = (fn, tuple(per_replica), run_eagerly)
        if key not in self._runs:
            self._runs[key] = self._make_run(fn, per_replica, run_eagerly)
        with self.cross_replica():
            return self._runs[key](*plain)

    def cross_replica(self):
        """Context in which distributed variables are read and changed as a whole."""
        return contextlib.nullcontext() if self.strategy is None else self.scope()

    def _make_run(self, fn, per_replica, run_eagerly):
        def run(*inputs):
            split = [value for value, own in zip(inputs, per_replica) if not own]
            rows = None
            if split:
                rows = with_static_rows(count_rows(split), split)
                if not self.shard.is_whole:
                    split = slice_rows(split, *self.shard.rows(rows))

            def call(part=None):
                local = replica.current().index - self.shard.first
                parts = iter(part or ())
                arguments = [
                    value[local] if own else next(parts) for value, own in zip(inputs, per_replica)
                ]
                return fn(*arguments)

            return self.replicate(call, split or None, rows, exact=True)

        if run_eagerly:
            return run
        return compat.compiled(run, reduce_retracing=True)

    def read(self, fn):
        with self.cross_replica():
            return fn()

    def count_everywhere(self, counts):
        """Returns the rows of every replica of the job, `[num_replicas]`.

        Args:
            counts: int32 `[replicas of this worker]`, their rows.
        """
        others = self.num_replicas - self.shard.first - self.shard.count
        return compat.sum_over_tasks(tf.pad(counts, [[self.shard.first, others]]), self.num_workers)


def local_results(strategy, outputs):
    """Returns one nest per replica of this worker."""
    if strategy is None:
        return [outputs]
    count = len(strategy.extended.worker_devices)
    flat = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(outputs)]
    # What is one and the same object on every replica (None, a Python number) comes back once.
    flat = [leaf if len(leaf) == count else leaf * count for leaf in flat]
    return [
        tf.nest.pack_sequence_as(outputs, [leaf[number] for leaf in flat])
        for number in range(count)
    ]


@contextlib.contextmanager
def _named_mismatch():
    """Names the error of replicas that do not reach the same collectives."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "merge_call" not in text or "kr.replica" in text:
            raise
        raise RuntimeError(
            "Some replicas reached a collective of kr.replica (or an optimizer's update) that "
            "others did not. Every replica must call the same collectives in the same order: do "
            "not put one under a condition on replica_id()."
        ) from error
