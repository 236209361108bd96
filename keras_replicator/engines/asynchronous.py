"""Asynchronous training: workers change variables on parameter servers, each in its own time.

The chief reads the data and hands out steps; whichever worker is free runs the next one. A worker
reads the weights that it finds, and its update comes when it comes. What has to be exact (counts,
metrics, learning-rate schedules, random numbers) does not depend on when: every step gets its
number from the chief, and gives back what it has counted.
"""

import collections
import contextlib
import queue
import time

import tensorflow as tf

from keras_replicator import compat, replica, workers
from keras_replicator.data.distributed import is_input_fn
from keras_replicator.data.rows import drop_optionals
from keras_replicator.data.split import Shard
from keras_replicator.engines import serving
from keras_replicator.engines.asynchronous_loop import AsynchronousLoop
from keras_replicator.engines.engine import Engine
from keras_replicator.engines.worker_input import WorkerSource
from keras_replicator.steps import tables
from keras_replicator.steps.optimizers import StepWindow
from keras_replicator.steps.tables import Tables

# How often somebody who waits for a step looks whether the servers still live, in seconds.
_LOOK = 0.25
_REMEMBERED = 10_000


class AsynchronousEngine(Engine):
    """Steps under a `tf.distribute.ParameterServerStrategy`, handed out by its coordinator.

    Args:
        strategy: The strategy, connected to workers and servers.
        cluster: The `Cluster` of the job.
        max_staleness: How many updates of others may come between a step's reading of the weights
            and its own update; None for no bound.
        peer_timeout: Seconds without any worker until that is an error.
        policy: How embedding tables are spread over servers, a `Tables`.
    """

    makes_anew = True
    asynchronous = True

    def __init__(self, strategy, cluster, max_staleness=None, peer_timeout=60, policy=Tables()):
        self.strategy = strategy
        self.cluster = cluster
        self.max_staleness = max_staleness
        self.peer_timeout = peer_timeout
        self.worker = 0
        self.num_workers = 1  # processes that run the script to its end
        self.num_replicas = 1  # that take part in one update
        self.shard = Shard()
        self.sync_batch_norm = False
        self._servers = len(cluster.ps)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
        self._built = {}  # step function -> the Replica in which it was built
        self._training = None  # the loop whose steps may be under way between calls
        self.records = collections.deque(maxlen=_REMEMBERED)  # of finished updates
        self._runs = {}
        self._policy = policy
        self._tables = []  # Keras variables that lie in parts on the servers

    # --------------------------------------------------------------------------- the interface

    @contextlib.contextmanager
    def scope(self):
        with contextlib.ExitStack() as stack:
            if tf.distribute.get_strategy() is not self.strategy:
                stack.enter_context(self.strategy.scope())
            stack.enter_context(tables.making(self._policy, self._servers, self._tables))
            yield

    def cross_replica(self):
        return contextlib.nullcontext()

    def owns(self, variable):
        value = compat.raw_variable(variable)
        return isinstance(value, tables.Table) or compat.on_parameter_server(value)

    def build(self, step, element_spec, window=None):
        current = replica.Replica(building=True, window=window, asynchronous=True)

        def trace(element):
            rows, batch = tf.reduce_sum(element[0]), element[1]
            current.rows = current.total_rows = rows
            current.graph = tf.compat.v1.get_default_graph()
            # TensorFlow traces once more where a step has made variables: count one trace.
            current.draws.clear()
            current.applied.clear()
            with replica.activate(current):
                step(drop_optionals(batch))

        with self.scope():
            compat.compiled(trace).get_concrete_function(element_spec)
        self._built[step] = current

    def tables_in_step(self):
        """Context of a step's tracing: tables are looked up row by row."""
        return tables.in_step(self._tables)

    def built(self, step):
        """Returns the `Replica` in which a step was built."""
        return self._built[step]

    def make_window(self, steps):
        return StepWindow(steps)

    def make_loop(self, step, **options):
        return AsynchronousLoop(self, step, **options)

    def training_source(self, x, steps):
        if not is_input_fn(x):
            return None
        return WorkerSource(x, self.coordinator, len(self.cluster.worker), steps)

    def read(self, fn):
        return fn()

    def agree(self, steps, stop):
        return steps, stop

    def sum_over_workers(self, arrays):
        return arrays

    def run(self, fn, inputs, run_eagerly=False):
        del run_eagerly
        for value in inputs:
            if isinstance(value, replica.PerReplica) and len(value.values) != 1:
                raise ValueError(
                    "kr.PerReplica must hold one value: under parameter servers each worker is a "
                    f"replica of its own. Received: {len(value.values)} values"
                )
        plain = [
            tf.nest.map_structure(
                tf.convert_to_tensor,
                value.values[0] if isinstance(value, replica.PerReplica) else value,
            )
            for value in inputs
        ]
        if fn not in self._runs:
            self._runs[fn] = compat.compiled(self._make_run(fn), reduce_retracing=True)
        structure, outputs = self._on_worker(self._runs[fn], plain)
        return [tf.nest.pack_sequence_as(structure, outputs)]

    def _make_run(self, fn):
        def run(*inputs):
            current = replica.Replica(asynchronous=True)
            with self.tables_in_step(), replica.activate(current):
                return fn(*inputs)

        return run

    def _on_worker(self, function, arguments):
        concrete = function.get_concrete_function(*arguments)
        results = queue.SimpleQueue()
        held = compat.schedule(
            self.coordinator,
            concrete,
            tuple(arguments),
            lambda worker, outputs: results.put(outputs),
        )
        outputs = self.wait(results)
        del held
        return concrete.structured_outputs, tf.nest.flatten(outputs)

    # --------------------------------------------------------------------------------- waiting

    def wait(self, results):
        """Returns the next entry of a queue that workers fill.

        Raises:
            Exception: What a step has failed with.
            WorkerLostError: When no worker can be reached.
        """
        looked = time.monotonic()
        while True:
            try:
                return results.get(timeout=_LOOK)
            except queue.Empty:
                self.coordinator.done()  # raises what a step has failed with
                if time.monotonic() - looked > self.peer_timeout:
                    looked = time.monotonic()
                    self._look_for_workers()

    def _look_for_workers(self):
        if not any(serving.is_up(address) for address in self.cluster.worker):
            raise workers.WorkerLostError(
                f"None of the {len(self.cluster.worker)} workers of this job could be reached for "
                f"peer_timeout={self.peer_timeout} seconds. Start the job again; with "
                "fit(resume=directory) it goes on from the last checkpoint."
            )

    @contextlib.contextmanager
    def named_losses(self):
        try:
            yield
        except workers.LOST as error:
            self._forget()
            named = workers.lost_server(error, self.cluster)
            if named is None:
                raise
            raise named from error
        except BaseException:
            self._forget()
            raise

    def _forget(self):
        """What is still under way after an error belongs to nobody."""
        training, self._training = self._training, None
        if training is not None:
            training.abandon()

    # -------------------------------------------------------------------- steps between calls

    def trains(self, loop):
        """Notes the loop that leaves steps under way between calls."""
        if self._training is not loop:
            self.settle()
            self._training = loop

    def settle(self):
        """Waits for steps under way; returns how many batches they count more than was told."""
        return 0 if self._training is None else self._training.settle()

    def readings(self):
        return {} if self._training is None else self._training.take_readings()
