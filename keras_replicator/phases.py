"""The loops of training, evaluation and prediction: which step they run, and how logs are read."""

import tensorflow as tf

from keras_replicator import compat, replica
from keras_replicator.alignment import alike
from keras_replicator.data.rows import slice_rows
from keras_replicator.long_work import announced
from keras_replicator.steps import metrics as step_metrics
from keras_replicator.steps import normalization, supervised
from keras_replicator.steps.gradient_norms import GradientNorms
from keras_replicator.steps.logs import StepLogs
from keras_replicator.steps.step_times import StepTimes


class Phases:
    """Makes each phase's loop once.

    Args:
        models: The `Models`.
        engine: The engine.
        compilation: The `Compilation`, or None (only prediction works then).
        steps: Dict of the user's step functions by phase: "train", "test", "predict".
    """

    def __init__(self, models, engine, compilation, steps):
        self._models = models
        self._engine = engine
        self._compilation = compilation
        self._steps = steps
        self._phases = {}
        self._norms = None
        self._times = None

    def want_gradient_norms(self):
        """Lets training note the norm of each update's gradient from now on."""
        if self._norms is None:
            self._norms = GradientNorms(self._compilation.optimizers, self._engine)
            self._phases.pop("train", None)

    def want_times(self):
        """Lets training note from now on where its time goes; on engines that can tell."""
        if self._times is None and self._engine.times_steps:
            self._times = StepTimes(self._engine.shard.count)
            self._phases.pop("train", None)

    def get(self, phase, spec):
        """Returns the `Phase`, with every variable that its step needs.

        Args:
            phase: "train", "test" or "predict".
            spec: The element spec of the data.
        """
        if phase not in self._phases:
            building = announced(f"Building the {phase} step", self._engine.worker == 0)
            with alike(self._engine, f"the {phase} step"), building:
                self._phases[phase] = self._make(phase, spec)
        return self._phases[phase]

    def _make(self, phase, spec):
        step, is_custom = self._step_of(phase)
        logs = StepLogs() if is_custom and phase != "predict" else None
        window = None
        if phase == "train" and self._compilation.accumulation > 1:
            window = self._engine.make_window(self._compilation.accumulation)
        on_replica = self._on_replica(step, phase, window, logs)
        run_eagerly = self._compilation is not None and self._compilation.run_eagerly
        norms, times = (self._norms, self._times) if phase == "train" else (None, None)
        scratch = {"model": self._models.host}
        for noted in (norms, times):
            scratch.update({} if noted is None else noted.scratch)
        loop = self._engine.make_loop(
            on_replica,
            add=None if logs is None else logs.add,
            collect=phase == "predict",
            window=window,
            scratch=scratch,
            run_eagerly=run_eagerly,
            updates=phase == "train",
        )
        try:
            self._engine.build(on_replica, spec, window)
        except Exception:
            if not run_eagerly:
                raise
            # A step that reads values, such as x.numpy(), is built with values.
            self._engine.build(lambda batch: _run_on_example(on_replica, spec), spec, window)
        step_metrics.prepare(compat.leaf_metrics(self._models.host))
        if logs is not None:
            step_metrics.prepare(logs.metrics.values())
        reader = LogReader(self._models.host, self._engine, logs, run_eagerly)
        return Phase(loop, reader, window, norms, times)

    def _step_of(self, phase):
        """Returns `(fn(batch) on a replica, whether its logs are the user's)`."""
        structure, host = self._models.structure, self._models.host
        given, own = self._steps[phase], f"{phase}_step"
        if given is not None:
            return (lambda batch: given(structure, batch)), True
        if compat.overridden(host, own):
            return getattr(host, own), True
        if self._models.is_group:
            raise ValueError(
                f"A trainer of several models needs `{own}=fn(models, batch)`. "
                f"Received: a dict of models and {own}=None"
            )
        own_metrics = compat.overridden(host, "compute_metrics")
        if phase == "train":
            jit_compile = self._compilation.jit_compile
            return (lambda batch: supervised.train_step(host, batch, jit_compile)), own_metrics
        if phase == "test":
            return (lambda batch: supervised.test_step(host, batch)), own_metrics
        return (lambda batch: supervised.predict_step(host, batch)), False

    def _on_replica(self, step, phase, window, logs):
        """Wraps a step: statistics are averaged after it, its logs become sums."""

        def run(batch):
            current = replica.current()
            result = step(batch)
            if phase == "predict":
                return _own_rows(result, current)
            if phase == "train":
                normalization.average_statistics(self._models.statistics())
                if window is not None and not current.building:
                    window.add_rows()
            return {} if logs is None else logs.reduce_locally(result)

        return run


class Phase:
    """One phase: its compiled loop, the reader of its logs; of training, what it notes, too."""

    def __init__(self, loop, reader, window, norms=None, times=None):
        self.loop = loop
        self.reader = reader
        self.window = window
        self.norms = norms
        self.times = times

    @property
    def logs(self):
        """The accumulated logs of a custom step, or None."""
        return self.reader.logs


class LogReader:
    """Reads the values of a phase's logs; only when somebody needs them.

    Args:
        host: The Keras model whose metrics are read.
        engine: The engine.
        logs: The `StepLogs` of a custom step, or None.
        run_eagerly: Whether nothing is compiled.
    """

    def __init__(self, host, engine, logs, run_eagerly):
        self.logs = logs
        self._host = host
        self._engine = engine
        self._results = self._compute if run_eagerly else compat.compiled(self._compute)

    def reset(self):
        """Starts an epoch."""
        with self._engine.cross_replica():
            self._host.reset_metrics()
            if self.logs is not None:
                self.logs.reset()

    def read(self):
        """Returns `{name: value}` over all replicas and workers."""
        if self.logs is None:
            return dict(self._engine.read(self._results))
        totals = self._engine.sum_parts(self.logs.totals())
        return self.logs.values(totals, dict(self._engine.read(self._results)))

    def _compute(self):
        """Every metric's result, across replicas."""
        if self.logs is None:
            return compat.metric_results(self._host)
        return {name: metric.result() for name, metric in self.logs.metrics.items()}


def _run_on_example(step, spec):
    """Runs a step outside of the graph, on one row of zeros."""
    current = replica.current()
    with tf.init_scope():
        current.rows = current.total_rows = tf.constant(1)
        _, batch = tf.nest.map_structure(
            lambda leaf: tf.zeros([size or 1 for size in leaf.shape], leaf.dtype), spec
        )
        step(batch)


def _own_rows(outputs, current):
    """Drops the output of the row that a replica without rows was given."""
    if not current.distributed or current.building:
        return outputs
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else slice_rows(leaf, 0, current.rows), outputs
    )
