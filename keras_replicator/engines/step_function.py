"""The function that a worker runs for one update: the step, its counting, its staleness.

Everything that is counted comes back as one vector of float64, in one message.
"""

import numpy as np
import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.engines.worker_input import next_element
from keras_replicator.steps.step_times import time_after_changes


class StepFunction:
    """The function that a worker runs for one update, and how its outputs are read.

    Args:
        step: Function of a batch.
        state: The `StepState`.
        engine: The engine.
        window: A `StepWindow`, or None.
        scratch: Entries for `Replica.scratch`.
        trains: Whether the step updates.
        collect: Whether outputs are collected.
        count: Batches of an update.
        spec: The element spec of `(rows, batch)`.
        own: The type of the iterator from which the worker takes its batches, or None: they come
            with the call.
    """

    def __init__(
        self, step, state, engine, *, window, scratch, trains, collect, count, spec, own=None
    ):
        self._step = step
        self._state = state
        self._engine = engine
        self._window = window
        self._scratch = scratch or {}
        self._trains = trains
        self._collect = collect
        self._count = count
        self._own = own
        self.replays = []
        self._sizes = {}
        self._logs = []
        self._structure = None
        batch = tf.nest.map_structure(
            lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, spec[1]
        )
        one = (tf.TensorSpec([], tf.int32), batch)
        starts = tf.TensorSpec([len(state.counters) + 2 * len(state.seeds)], tf.int64)
        data = [one] * count if own is None else own
        self.concrete = compat.compiled(self._update).get_concrete_function(starts, data)

    def _update(self, starts, data):
        graph = tf.compat.v1.get_default_graph()
        if not self._trains:
            return self._on_worker(starts, data, graph)
        before = self._engine.updates.read_value()
        with tf.control_dependencies([before]):
            begun = tf.timestamp()  # on the worker: servers do not talk to each other
        first = len(graph.get_operations())
        with tf.control_dependencies([begun]):
            results = self._on_worker(starts, data, graph)
        ended = time_after_changes(graph, first)
        with tf.control_dependencies([ended]):
            applied = compat.count_up(self._engine.updates)
        times = tf.stack([begun, ended, tf.cast(applied - before, tf.float64)])
        results["numbers"] = tf.concat([results["numbers"], times], 0)
        return results

    def _on_worker(self, starts, data, graph):
        current = replica.Replica(
            window=self._window,
            asynchronous=True,
            sync_batch_norm=self._engine.sync_batch_norm,
        )
        current.graph = graph
        current.scratch.update(self._scratch)
        outputs, logs, rows_seen = [], [], tf.constant(0, tf.int64)
        with (
            self._state.in_step(starts),
            self._engine.tables_in_step(),
            replica.activate(current),
        ):
            if self._window is not None and self._trains:
                self._window.open()
            for rows, batch in self._elements(data):
                current.rows = current.total_rows = rows
                result = self._step(batch)
                rows_seen += tf.cast(rows, tf.int64)
                (outputs if self._collect else logs).append(result)
            if self._window is not None and self._trains:
                self._window.close()
            added = self._state.added(starts)
        self.replays = current.replayed
        self._sizes = {"rows": 1, "added": self._state.size}
        numbers = [tf.cast(rows_seen, tf.float64)[tf.newaxis], added]
        self._logs = list(logs[0]) if logs else []
        numbers += [tf.add_n([each[name] for each in logs]) for name in self._logs]
        results = {
            "numbers": tf.concat(numbers, 0),
            "replays": [replay.tensors() for replay in self.replays],
            "outputs": [],
        }
        if self._collect:
            self._structure = outputs[0]
            leaves = tf.nest.flatten(outputs[0])
            results["outputs"] = [leaf for leaf in leaves if leaf is not None]
        return results

    def _elements(self, data):
        if self._own is None:
            return data
        return (next_element(data) for _ in range(self._count))

    def split(self, numbers):
        """Returns a dict of what the vector of numbers holds."""
        numbers, found, place = np.asarray(numbers), {}, 0
        for name in ("rows", "added"):
            found[name] = numbers[place : place + self._sizes[name]]
            place += self._sizes[name]
        found["logs"] = {
            name: numbers[place + 2 * i : place + 2 * i + 2] for i, name in enumerate(self._logs)
        }
        found["times"] = numbers[place + 2 * len(self._logs) :]
        return found

    def restore(self, leaves):
        """Returns collected outputs in the structure that the step gave."""
        leaves = iter(leaves)
        flat = [None if leaf is None else next(leaves) for leaf in tf.nest.flatten(self._structure)]
        return tf.nest.pack_sequence_as(self._structure, flat)
