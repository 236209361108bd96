"""One trainer on some simulated devices, whose steps run eagerly and can be run again."""

import contextlib
import dataclasses
import gc

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.run_state import RunState
from keras_replicator.trainer import ReplicatedTrainer
from keras_replicator.verify import parcel
from keras_replicator.verify.hooks import RECORDER, UPDATES


@dataclasses.dataclass
class Step:
    """What one step left behind: dicts of arrays by name."""

    loss: dict
    gradient: dict
    weights: dict
    metrics: dict


class Subject:
    """The user's model and step on a number of replicas.

    Args:
        job: A `Job`.
        replicas: Number of simulated devices.
        draws: The `Draws` that random operations pass by.
        others: Variables of no model that steps may change, see `variables_of_others`.
    """

    def __init__(self, job, replicas, draws, others=()):
        # Layers get the same names in every subject, and weights the same paths.
        keras.utils.clear_session(free_memory=False)
        keras.config.set_dtype_policy(job.policy)
        content = parcel.unpack(job.content)
        self.replicas = replicas
        self._draws = draws
        options = {"seed": 0 if job.seed is None else job.seed, **content["steps"]}
        with self._standing_in():
            self.trainer = ReplicatedTrainer(
                content["model"],
                strategy="one_device" if replicas == 1 else "mirrored",
                devices=[f"CPU:{number}" for number in range(replicas)],
                **options,
            )
            parcel.TrainerStandIn.current = self.trainer
            self.trainer.compile(**{**content["compile"], "run_eagerly": True})
            session = self.trainer.session
            self._phase = session.phases.get("train", job.spec)
        self._engine, self._host = session.engine, session.models.host
        self._accumulation = session.window.size
        self._state = RunState(self._host, session.optimizers, self._engine)
        self.sync_batch_norm = self._engine.sync_batch_norm
        shapes = [tuple(weight.shape) for weight in self._host.weights]
        if job.weights is not None and shapes == [weight.shape for weight in job.weights]:
            with self._engine.cross_replica():
                self._host.set_weights(job.weights)
        self._others = others

    @contextlib.contextmanager
    def _standing_in(self):
        before = parcel.TrainerStandIn.current
        parcel.TrainerStandIn.current = getattr(self, "trainer", None)
        try:
            yield
        finally:
            parcel.TrainerStandIn.current = before

    # ----------------------------------------------------------------------------------- state

    def _parts(self):
        return self._state.partial(self._phase.window).values()

    def snapshot(self):
        """Returns the whole state that replicas share, as arrays."""
        shared = {n: np.array(compat.first_copy(v)) for n, v in self._state.shared().items()}
        return {**shared, "others": [variable.numpy() for variable in self._others]}

    def restore(self, state):
        """Gives every replica a state, and forgets what each holds for itself."""
        for name, variable in self._state.shared().items():
            for copy in compat.replica_copies(variable):
                copy.assign(state[name])
        for variable in self._parts():
            for copy in compat.replica_copies(variable):
                copy.assign(tf.zeros_like(copy))
        for variable, value in zip(self._others, state["others"]):
            variable.assign(value)

    def handles(self):
        """Returns `{identity of a handle: name}` of the model's variables on all replicas."""
        return {
            id(copy.handle): variable.path
            for variable in self._host.variables
            for copy in compat.replica_copies(variable)
        }

    @property
    def averaged(self):
        """The names of the variables whose values the trainer averages after a step."""
        return {
            variable.path
            for variable in self._host.non_trainable_variables
            if tf.as_dtype(variable.dtype).is_floating
        }

    @property
    def variables(self):
        """The names of all variables that a step may assign."""
        optimizers = self.trainer.optimizers.values()
        found = [*self._host.weights, *(v for o in optimizers for v in o.variables)]
        return {variable.path for variable in found}

    def local_normalizations(self):
        """Returns the names of layers that normalise each replica's rows by themselves."""
        return [
            layer.name
            for layer in compat.flatten_layers(self._host)
            if isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
            and not layer.synchronized
        ]

    @property
    def lowest_precision(self):
        """Whether a layer computes in 16 bits."""
        return any(
            layer.compute_dtype in ("float16", "bfloat16")
            for layer in compat.flatten_layers(self._host)
        )

    # ------------------------------------------------------------------------------------- runs

    def run(self, state, batches, mode="own", sync=None, first=0, snapshots=None):
        """Runs steps from a state.

        Args:
            state: What `snapshot` returned, also that of another subject.
            batches: List of `(rows, batch)`.
            mode: Of the `Draws`.
            sync: Whether BatchNormalization is synchronized; None for what was compiled.
            first: Number of the first step.
            snapshots: A list that takes the state before each step, or None.

        Returns:
            A list of `Step`.
        """
        self.restore(state)
        self._engine.sync_batch_norm = self.sync_batch_norm if sync is None else sync
        self._draws.begin(mode)
        steps = []
        UPDATES.active = True
        try:
            with self._standing_in():
                for number, (rows, batch) in enumerate(batches):
                    if snapshots is not None:
                        snapshots.append(self.snapshot())
                    last = number == len(batches) - 1
                    steps.append(self._step(rows, batch, first + number, last))
        finally:
            UPDATES.active = False
            self._engine.sync_batch_norm = self.sync_batch_norm
        return steps

    def _step(self, rows, batch, number, last):
        self._draws.begin_step(number)
        self._phase.reader.reset()
        UPDATES.collected = []
        position = number % self._accumulation
        self._phase.loop.one((tf.constant(rows, tf.int32), batch), position)
        if last and self._accumulation > 1 and position + 1 < self._accumulation:
            self._phase.loop.close_window()
        logs = _numbers(compat.pythonify(self._phase.reader.read()))
        loss = {"loss": logs.pop("loss")} if "loss" in logs else {}
        return Step(
            loss=loss,
            gradient=dict(UPDATES.collected),
            weights=self._weights(),
            metrics=logs,
        )

    def _weights(self):
        """Every copy of every weight: replicas must not drift apart either."""
        found = {}
        for variable in self._host.weights:
            copies = [copy.numpy() for copy in compat.replica_copies(variable)]
            worst = next((c for c in copies[1:] if not np.array_equal(c, copies[0])), copies[0])
            found[_unique(found, variable.path)] = np.array(copies[0]), np.array(worst)
        return found

    @contextlib.contextmanager
    def recorded(self):
        """Context: the operations of a run are noted; gives the recorder."""
        with RECORDER.recording():
            yield RECORDER


def _numbers(logs, prefix=""):
    found = {}
    for name, value in logs.items():
        if isinstance(value, dict):
            found.update(_numbers(value, f"{name}/"))
        else:
            found[f"{prefix}{name}"] = np.asarray(value)
    return found


def _unique(names, name):
    number, unique = 1, name
    while unique in names:
        number += 1
        unique = f"{name}~{number}"
    return unique


def variables_of_others():
    """Returns the variables that exist before any trainer does: counters of the user's modules."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == "ResourceVariable"
        and (thing.dtype.is_floating or thing.dtype.is_integer)
    ]
