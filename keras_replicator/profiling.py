"""Measures what one replica needs: seconds and memory of a step, bytes of its gradients."""

import platform
import time

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat, memory
from keras_replicator.batch_size import repeat_rows
from keras_replicator.run_state import RunState
from keras_replicator.scaling import Profile

_ROUNDS = 5
# A round runs for about so long.
_SECONDS = 0.3


def measure(session, sample, spec, batch_size, rows=None):
    """Returns the `Profile` of a trainer's replica.

    Real steps are run on two sizes of batches, and everything is put back afterwards.

    Args:
        session: The `Session` of a trainer; with several replicas its devices share the work, and
            what is measured is a step of all of them.
        sample: A batch whose rows are used, again and again.
        spec: The element spec of the data.
        batch_size: Rows of the global batch.
        rows: Rows of the larger of the two batches; default, the global batch.
    """
    phase = session.phases.get("train", spec)
    engine, devices = session.engine, session.plan.devices
    state = RunState(session.models.host, session.optimizers, engine)
    kept = state.collect(phase.window, {} if phase.logs is None else phase.logs.totals())
    large = max(rows or batch_size, 1)
    small = max(large // 4, 1)
    updates = None
    try:
        with engine.named_losses():
            watches, before = {}, _iterations(session)
            for size in sorted({small, large}):
                memory.reset_peak(devices)
                batch = repeat_rows(sample, size, engine.shard)
                watches[size] = _Watch(engine, phase.loop, batch, size, session.window.size)
                watches[size].peak = memory.peak(devices)
                updates = updates or _updates_since(session, before)
            for _ in range(_ROUNDS):  # in turns: what disturbs one size disturbs the other
                for watch in watches.values():
                    watch.round()
    finally:
        state.restore(kept, phase.window, phase.logs)
    (first, least), (last, most) = ((watches[s].best, watches[s].peak) for s in (small, large))
    per_row = max((last - first) / (large - small), 0.0) if large > small else last / large
    fixed = max(last - large * per_row, 0.0)
    if large > small and fixed == 0.0:
        per_row = last / large
    grows = (most - least) / (large - small) if large > small else None
    trainable = session.models.host.trainable_variables
    statistics = _assigned_statistics(session)
    slots = [v for optimizer in session.optimizers.values() for v in optimizer.variables]
    weights = session.models.host.weights
    return Profile(
        device=_describe(devices),
        batch_size=batch_size,
        seconds_fixed=fixed,
        seconds_per_row=per_row,
        update_bytes=updates,
        step_bytes=statistics,
        state_bytes=_bytes(weights) + _bytes(slots) + _bytes(trainable),
        bytes_per_row=grows if grows is None or grows > 0 else 0.0,
        accumulation=session.window.size,
    )


class _Watch:
    """Times steps on batches of one size; the least of all rounds counts.

    Whatever disturbs a round makes it slower. When it is made, it runs one update.
    """

    def __init__(self, engine, loop, batch, rows, window):
        with tf.device("CPU:0"):
            dataset = tf.data.Dataset.from_tensors((tf.constant(rows, tf.int32), batch))
            self._iterator = iter(dataset.map(_with_open_rows).repeat())
        self._engine, self._loop = engine, loop
        self._steps = None
        self.best, self.peak = float("inf"), 0
        loop(self._iterator, window)

    def round(self):
        """Runs some steps; the first round finds out how many."""
        if self._steps is None:
            steps = max(int(_SECONDS / self._time(1)), 1)
            self._steps, _ = self._engine.agree(steps, False)  # all workers run as many
        self.best = min(self.best, self._time(self._steps))

    def _time(self, steps):
        started = time.perf_counter()
        self._loop(self._iterator, steps)
        return (time.perf_counter() - started) / steps


def _with_open_rows(rows, batch):
    """Forgets how many rows a batch has, so that batches of all sizes share one trace."""

    def forget(leaf):
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return rows, tf.nest.map_structure(forget, batch)


def _iterations(session):
    return {name: int(optimizer.iterations) for name, optimizer in session.optimizers.items()}


def _updates_since(session, before):
    """Bytes of the gradients of all updates of one window: a step may make several."""
    made = _iterations(session)
    return sum(
        (made[name] - before[name]) * _bytes(compat.known_variables(optimizer))
        for name, optimizer in session.optimizers.items()
    )


def _assigned_statistics(session):
    """Bytes of the statistics of BatchNormalization, which every step averages."""
    found = [
        variable
        for layer in compat.flatten_layers(session.models.host)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for variable in layer.non_trainable_variables
    ]
    return _bytes(found)


def _bytes(variables):
    return int(
        sum(
            np.prod(variable.shape, dtype=np.int64) * tf.as_dtype(variable.dtype).size
            for variable in variables
        )
    )


def _describe(devices):
    if devices[0].startswith("CPU"):
        return f"measured on {len(devices)} CPU(s) of {platform.machine()}"
    found = tf.config.list_physical_devices(devices[0].split(":")[0])
    name = tf.config.experimental.get_device_details(found[0]).get("device_name", devices[0])
    return f"measured on {name}"
