"""One replica over several devices: DTensor under a Keras model.

A step is written, traced and updated as on one device; its tensors have parts on the devices of a
mesh, and DTensor inserts what the parts have to tell each other. Rows are split over the mesh's
batch axis, variables as the `Layout` says.
"""

import contextlib
import dataclasses
import os

import tensorflow as tf

from keras_replicator import compat, copies, footprint, placement, replica
from keras_replicator.auto_layout import auto_layout
from keras_replicator.data.rows import drop_optionals
from keras_replicator.data.split import Shard
from keras_replicator.engines import substitutes as _substitutes  # noqa: F401
from keras_replicator.engines.joined import JoinedEngine
from keras_replicator.engines.mesh_loop import MeshLoop
from keras_replicator.engines.mesh_seed import GlobalSeed
from keras_replicator.engines.mesh_variables import MeshVariable, axes, inside, split, whole
from keras_replicator.steps.optimizers import GradientWindow

# DTensor's pass that joins all-reduces moves reads of a variable before the assignment that they
# follow: Adam with global_clipnorm then takes the slots of the step before (TensorFlow 2.21).
os.environ.setdefault("DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "0")

dtensor = tf.experimental.dtensor
_meshes = {}
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class MeshEngine(JoinedEngine):
    """Steps on a DTensor mesh.

    Of several workers each has consecutive devices of the mesh, all parts of every variable, and
    reads the whole of each batch.

    Args:
        layout: The `Layout`, with every size of its mesh known.
        devices: Names of its devices, those of this worker.
        cluster: The `Cluster` of several workers, or None.
        watch: The `Watch` over the other workers, or None.
        start_timeout: Seconds that a worker waits for what another one has to tell.
    """

    makes_anew = True
    takes_xla = False
    has_parts = True
    sync_batch_norm = True

    def __init__(self, layout, devices, cluster=None, watch=None, start_timeout=600):
        if cluster is None:
            super().__init__()
        else:
            index, count = cluster.worker_index, cluster.num_workers
            super().__init__(index, count, cluster, watch, start_timeout)
        self.layout = layout
        self.mesh = self.make_mesh(devices)
        self.shard = Shard()
        self.seed = GlobalSeed(self.mesh)
        self._models = []
        self._runs = {}
        self._made = None  # the list to which new variables are added, while workers compare them

    def make_mesh(self, devices):
        """Returns the DTensor mesh; one for each set of devices and sizes of the process."""
        sizes, devices = list(self.layout.mesh.items()), list(devices)
        key = (tuple(sizes), tuple(devices))
        if key not in _meshes and self.num_workers == 1:
            _meshes[key] = dtensor.create_mesh(sizes, devices=devices)
        elif key not in _meshes:
            kind = devices[0].partition(":")[0]
            _meshes[key] = dtensor.create_distributed_mesh(
                sizes, local_devices=devices, device_type=kind
            )
        return _meshes[key]

    # --------------------------------------------------------------------------- making variables

    @contextlib.contextmanager
    def scope(self):
        with placement.placing(self._place):
            yield

    def cross_replica(self):
        return self.scope()

    @contextlib.contextmanager
    def recording(self, made):
        before, self._made = self._made, made
        try:
            yield
        finally:
            self._made = before

    def owns(self, variable):
        value = compat.raw_variable(variable)
        return isinstance(value, MeshVariable) and value.home is self.mesh

    def make(self, function):
        """Calls a function that makes models: their layout is known before they are allocated."""
        try:
            with compat.kept_names(only_on_error=True), compat.deferred_variables() as deferred:
                made = function()
        except ValueError as error:
            if "stateless scope" not in str(error):
                raise
            return self._make_whole(function)
        self._settle(made)
        with self.scope():
            deferred.initialize()
        return made

    def _make_whole(self, function):
        """For functions that need values at once, such as those that compile the model."""
        with tf.device("CPU:0"):
            made = function()
        self._settle(made)
        for model in _models(made):
            for variable in [*model.variables, *compat.seed_states(model)]:
                if not self.owns(variable):
                    self._place(variable, compat.raw_variable(variable).numpy(), None)
        return made

    def _settle(self, made):
        """Makes the rules of an automatic layout, and checks those of a given one."""
        self._models = models = _models(made)
        if self.layout.is_auto:
            self.layout = auto_layout(
                {str(number): model for number, model in enumerate(models)}, self.layout.mesh
            )
        self.layout.check_workers(self.layout.num_devices // self.num_workers)
        if all(model.built and model.weights for model in models):
            self._check()

    def _check(self):
        """Raises `ValueError` where a rule of the layout does not fit the models."""
        weights = [weight for model in self._models for weight in model.weights]
        self.layout.check({weight.path: tuple(weight.shape) for weight in weights})

    def complete(self, plan, optimizers=None):
        weights = self._pieces([weight for model in self._models for weight in model.weights])
        if not weights:
            return plan
        rules = [f"{p.path} {self.layout.of(p.path, p.shape)}" for p in weights if p.parts > 1]
        plan = plan.with_details(
            layout=f"{len(rules)} of {len(weights)} weights split: {', '.join(rules)}"
        )
        counts = footprint.foresee(weights, self._slots(optimizers))
        return dataclasses.replace(plan, memory=counts)

    def _pieces(self, variables, like=None):
        return [
            footprint.Piece(
                path=variable.path,
                shape=tuple(variable.shape),
                itemsize=tf.as_dtype(variable.dtype).size,
                parts=self.layout.parts(self.names_for(variable.path, variable.shape, like)),
                trainable=variable.trainable,
            )
            for variable in variables
        ]

    def _slots(self, optimizers):
        """Returns `Piece`s of what optimizers hold, or None where that is not known yet."""
        found = []
        for optimizer in (optimizers or {}).values():
            if optimizer.built:
                found += [self._held(variable) for variable in optimizer.variables]
            elif len(optimizers) == 1 and len(self._models) == 1 and self._models[0].built:
                found += self._foreseen(optimizer)
            else:
                return None
        return None if optimizers is None else found

    def _held(self, variable):
        specs = compat.raw_variable(variable).layout.sharding_specs
        return footprint.Piece(
            path=variable.path,
            shape=tuple(variable.shape),
            itemsize=tf.as_dtype(variable.dtype).size,
            parts=self.layout.parts(None if s == dtensor.UNSHARDED else s for s in specs),
        )

    def _foreseen(self, optimizer):
        """Builds a copy of an optimizer without giving its slots any memory."""
        found = []

        def record(variable, value, like):
            if not callable(value):
                compat.set_raw_variable(variable, tf.Variable(value))
            else:
                found.extend(self._pieces([variable], like))

        copy = copies.copy_optimizer(optimizer)
        with placement.placing(record):
            copy.build(self._models[0].trainable_variables)
        return found

    def names_for(self, path, shape, like=None):
        """Returns the mesh axis, or None, of each axis of a variable."""
        if like is placement.OWN:
            return (None,) * len(shape)
        if like is not None:
            names = self.layout.of(like.path, like.shape)
            return names if tuple(like.shape) == tuple(shape) else (None,) * len(shape)
        return self.layout.of(path, shape)

    def _place(self, variable, value, like):
        with tf.device("CPU:0"):
            value = tf.cast(value() if callable(value) else value, variable.dtype)
        shape = tuple(value.shape)
        names = self.names_for(variable.path, shape, like)
        made = MeshVariable(
            split(value, axes(self.mesh, names, len(shape))),
            trainable=variable.trainable,
            name=variable.name,
        )
        made.home = self.mesh
        compat.set_raw_variable(variable, made)
        if self._made is not None:
            self._made.append(made)

    # --------------------------------------------------------------------------------- one pass

    @contextlib.contextmanager
    def on_mesh(self):
        """Context: functions and operations run on the mesh."""
        with inside(), dtensor.default_mesh(self.mesh):
            yield

    def replicate(self, fn, batch=None, rows=None, window=None, scratch=None):
        """Runs (or traces) `fn(batch)` once, with the rows of the whole batch."""
        rows = None if rows is None else tf.constant(rows, tf.int32)
        current = replica.Replica(rows=rows, total_rows=rows, window=window, mesh=self.mesh)
        current.scratch.update(scratch or {})
        with self.scope(), replica.activate(current):
            return fn() if batch is None else fn(batch)

    def layers(self):
        """Returns every layer of the models."""
        return [layer for model in self._models for layer in compat.flatten_layers(model)]

    def put(self, batch, axis=0):
        """Returns a batch of plain tensors as DTensors, rows split where they divide.

        Args:
            batch: A nest of tensors, of Optionals, or None.
            axis: The axis of the rows.
        """
        batch = drop_optionals(batch)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else self._put(leaf, axis), batch
        )

    def _put(self, leaf, axis):
        if not isinstance(leaf, tf.Tensor) or leaf.dtype == tf.string:
            raise ValueError(
                "A mesh takes dense tensors of numbers; ragged and sparse tensors and strings have "
                "no parts. Convert them in the data pipeline (`to_tensor`, a lookup layer in "
                f"`dataset.map`). Received: {leaf}"
            )
        parts = self.layout.batch_size
        rank = leaf.shape.rank
        names = [None] * rank
        if rank > axis and parts > 1 and leaf.shape[axis] % parts == 0 and leaf.shape[axis] > 0:
            names[axis] = self.layout.batch_axis
        return split(leaf, axes(self.mesh, names, rank))

    def gathered(self, nest):
        """Returns a nest of DTensors of which this worker has all parts; part of a step."""
        if self.num_workers == 1:
            return nest

        def gather(leaf):
            if not isinstance(leaf, tf.Tensor):
                return leaf
            return dtensor.relayout(leaf, dtensor.Layout.replicated(self.mesh, leaf.shape.rank))

        return tf.nest.map_structure(gather, nest)

    def get(self, nest):
        """Returns a nest of DTensors, as `gathered` gives it, as plain tensors."""
        with inside():
            return tf.nest.map_structure(
                lambda leaf: tf.constant(whole(leaf)) if isinstance(leaf, tf.Tensor) else leaf, nest
            )

    # --------------------------------------------------------------------------- the interface

    def build(self, step, element_spec, window=None):
        def trace(element):
            rows, batch = element[:2]
            current = replica.Replica(rows=rows, total_rows=rows, building=True, window=window)
            with replica.activate(current):
                step(drop_optionals(batch))

        with self.scope():
            compat.compiled(trace).get_concrete_function(element_spec)
        self._check()

    def make_window(self, steps):
        return GradientWindow(steps, self.scope)

    def make_loop(self, step, **options):
        return MeshLoop(self, step, **options)

    def sum_parts(self, arrays):
        return arrays  # there is one replica, and every worker knows all of it

    def run(self, fn, inputs, run_eagerly=False):
        values = []
        for value in inputs:
            if isinstance(value, replica.PerReplica):
                if len(value.values) != 1:
                    raise ValueError(
                        "kr.PerReplica must hold one value: a mesh is one replica over "
                        f"{self.layout.num_devices} devices. Received: {len(value.values)} values"
                    )
                value = value.values[0]
            values.append(tf.nest.map_structure(_tensor, value))
        rows = _rows(values)

        def call(*arguments):
            return self.gathered(self.replicate(lambda: fn(*arguments), rows=rows))

        key = (fn, rows)
        if key not in self._runs:
            self._runs[key] = call if run_eagerly else compat.compiled(call)
        values = [self.put(value) for value in values]
        with self.seed.on_mesh(), self.on_mesh():
            outputs = self._runs[key](*values)
        return [self.get(outputs)]

    def read(self, fn):
        # Outside of a step variables are plain: nothing has to be compiled for the mesh.
        return getattr(fn, "python_function", fn)()


def _models(made):
    return list(made.values()) if isinstance(made, dict) else [made]


def _tensor(leaf):
    return leaf if isinstance(leaf, _COMPOSITE) else tf.convert_to_tensor(leaf)


def _rows(values):
    """Rows of inputs of `run`, or None where they have none."""
    for leaf in tf.nest.flatten(values):
        if leaf is not None and leaf.shape.rank:
            return int(leaf.shape[0])
    return None
