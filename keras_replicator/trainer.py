"""`ReplicatedTrainer`: a Keras model and its step, trained on any number of replicas.

This is the only file that composes the others: plan -> engine -> models -> data -> step -> loop.
"""

import dataclasses
import functools
import sys

from keras_replicator import compat, workers
from keras_replicator import steps as _steps  # noqa: F401 - teaches Keras the replica's semantics
from keras_replicator.alignment import alike
from keras_replicator.checks import (
    check_class_weight,
    check_eager,
    check_fit,
    check_input,
    check_positive,
    check_seconds,
    check_step,
)
from keras_replicator.compilation import DEFAULT_OPTIMIZER, adoptable, compile_models
from keras_replicator.data.rows import count_rows
from keras_replicator.data.sources import make_source
from keras_replicator.dev_run import without_writers
from keras_replicator.engines.factory import choose_engine
from keras_replicator.epochs import WindowPosition
from keras_replicator.fitting import (
    evaluate_stream,
    fit_epochs,
    keeping_metrics,
    predict_stream,
)
from keras_replicator.models import Models
from keras_replicator.outputs import join_outputs
from keras_replicator.phases import Phases
from keras_replicator.planning import planning_from_environment
from keras_replicator.session import Session
from keras_replicator.shared_files import worker_files
from keras_replicator.stream import Stream


class ReplicatedTrainer:
    """Trains a Keras model with the same numbers on any number of replicas.

    Args:
        model: A function without arguments that builds a `keras.Model` (or a dict of them), or a
            `keras.Model`. A model object gets the trained weights back when `fit` ends.
        strategy: "auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu",
            "mesh", or a `tf.distribute.Strategy`.
        devices: None for all devices that were found, an int for that many, names such as
            `["GPU:0", "GPU:1"]`, or for each replica a list of its logical devices, see
            `kr.replica.logical_device`.
        layout: Model parallelism: a `kr.Layout` or a `keras.distribution.LayoutMap`, or None.
        train_step: Optional `fn(model, batch) -> logs`, run once per replica.
        test_step: Optional `fn(model, batch) -> logs`.
        predict_step: Optional `fn(model, batch) -> outputs`.
        expected_workers: The number of workers that the job must have, or None.
        peer_timeout: Seconds until a lost worker is an error.
        start_timeout: Seconds until a missing worker is an error.
        max_staleness: For parameter servers only: how many updates of other workers may come
            between a step's reading of the weights and its own update; None for any number.
        tables: For parameter servers only: a `kr.Tables`, which says how embedding tables are
            spread over the servers; None for parts of at least 256 kB, one for each server.
        seed: Seed of initial weights, dropout and shuffling, or None.

    Raises:
        ValueError: When an argument is wrong; the message names it and the fix.

    Example:

    >>> import keras, numpy as np
    >>> import keras_replicator as kr
    >>> trainer = kr.ReplicatedTrainer(
    ...     lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), devices=1
    ... )
    >>> trainer.compile(optimizer="sgd", loss="mse")
    >>> history = trainer.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
    >>> list(history.history)
    ['loss']
    """

    def __init__(
        self,
        model,
        *,
        strategy="auto",
        devices=None,
        layout=None,
        train_step=None,
        test_step=None,
        predict_step=None,
        expected_workers=None,
        peer_timeout=60,
        start_timeout=600,
        max_staleness=None,
        tables=None,
        seed=None,
    ):
        check_seconds("peer_timeout", peer_timeout)
        check_seconds("start_timeout", start_timeout)
        self._steps = {"train": train_step, "test": test_step, "predict": predict_step}
        for phase, step in self._steps.items():
            check_step(f"{phase}_step", step)
        # What the user passed, for `verify`; not for users.
        self.given = {"model": model, "steps": self._given_steps(), "seed": seed}
        self._planning = planning_from_environment()
        if self._planning is not None:
            strategy, devices, expected_workers = "one_device", None, None
        plan, self._engine = choose_engine(
            strategy,
            devices,
            expected_workers,
            peer_timeout,
            start_timeout,
            max_staleness,
            tables,
            layout,
        )
        with self._engine.named_losses():
            self._seed = seed = workers.start(self._engine, plan, seed)
            if seed is not None:
                compat.set_random_seed(seed)
            compat.ensure_global_seed_generator()
            with alike(self._engine, "the model"):
                self._models = Models(model, self._engine)
        compat.ensure_global_seed_generator()  # a build function that sets a seed has dropped it
        self._models.route_to(self)
        plan = self._engine.complete(plan)
        self._session = Session(plan, self._engine, self._models, seed)
        self._session.phases = Phases(self._models, self._engine, None, self._steps)
        self.history = None
        if (arguments := adoptable(self._models.given)) is not None:
            self.compile(**arguments)

    # ------------------------------------------------------------------------------ properties

    @property
    def plan(self):
        """The `Plan`: what runs where, and why."""
        return self._session.plan

    @property
    def model(self):
        """The Keras model that is trained, or the dict of models."""
        return self._models.structure

    @property
    def num_replicas(self):
        """Replicas that take part in one update."""
        return self._engine.num_replicas

    @property
    def strategy(self):
        """The `tf.distribute.Strategy`, or None where one device needs none."""
        return self._engine.strategy

    @property
    def session(self):
        """The `Session`: what the parts of the package share. Not for users."""
        return self._session

    @property
    def optimizers(self):
        """Dict of the optimizers, by the names under which `compile` took them."""
        return self._session.optimizers

    @property
    def step_records(self):
        """Under parameter servers the last updates: who made each, when, and how stale it was.

        A list of objects with `worker`, `begun` and `ended` (seconds on the worker's clock),
        `staleness` and `rows`, in the order in which they ended; at most 10,000. Empty elsewhere.
        """
        return list(self._engine.records)

    # --------------------------------------------------------------------------------- compile

    def compile(
        self,
        optimizer=DEFAULT_OPTIMIZER,
        loss=None,
        metrics=None,
        weighted_metrics=None,
        loss_weights=None,
        *,
        steps_per_execution="auto",
        jit_compile="auto",
        gradient_accumulation_steps=1,
        sync_batch_norm=False,
        run_eagerly=False,
        **more,
    ):
        """Configures training, as `keras.Model.compile` does.

        Args:
            optimizer: Name or instance; or a dict of them, for custom steps.
            loss: As in Keras.
            metrics: As in Keras.
            weighted_metrics: As in Keras.
            loss_weights: As in Keras.
            steps_per_execution: Steps that one compiled call runs; "auto" adapts to the model
                and to what callbacks ask for.
            jit_compile: Whether XLA compiles forward and backward pass per replica.
            gradient_accumulation_steps: Steps that make one update.
            sync_batch_norm: Whether every BatchNormalization takes its statistics over the rows
                of all replicas.
            run_eagerly: Whether steps run without compilation (slow, for debugging).
            **more: What a subclass's own `compile` takes.

        Raises:
            ValueError: When an argument is wrong.
        """
        self.given["compile"] = {
            "optimizer": optimizer,
            "loss": loss,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "loss_weights": loss_weights,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "sync_batch_norm": sync_batch_norm,
            **more,
        }
        self._models.refresh()
        session = self._session
        own_step = self._steps["train"] is not None or compat.overridden(
            self._models.host, "train_step"
        )
        on_cpu = all(name.startswith("CPU") for name in session.plan.devices)
        with self._engine.named_losses(), alike(self._engine, "the optimizers and metrics"):
            session.compilation = compile_models(
                self._models,
                self._engine,
                optimizer=optimizer,
                given={
                    "loss": loss,
                    "metrics": metrics,
                    "weighted_metrics": weighted_metrics,
                    "loss_weights": loss_weights,
                },
                steps_per_execution=steps_per_execution,
                jit_compile=jit_compile,
                gradient_accumulation_steps=gradient_accumulation_steps,
                sync_batch_norm=sync_batch_norm,
                run_eagerly=run_eagerly,
                accelerated=not on_cpu and not own_step and self._engine.takes_xla,
                more=more,
            )
        self._engine.sync_batch_norm = session.compilation.sync_batch_norm
        session.phases = Phases(self._models, self._engine, session.compilation, self._steps)
        session.window = WindowPosition(session.compilation.accumulation)
        policy = self._models.host.dtype_policy.name
        plan = session.plan.with_details(
            **session.compilation.describe(session.plan, policy, self._seed)
        )
        session.plan = self._engine.complete(plan, session.optimizers)

    def _given_steps(self):
        return {f"{phase}_step": step for phase, step in self._steps.items()}

    def _require_compiled(self, method):
        check_eager(method)
        if self._session.compilation is None:
            raise ValueError(
                f"Call trainer.compile(optimizer=…, loss=…) before trainer.{method}(). "
                f"Received: {method}() on a trainer that has not been compiled"
            )

    # -------------------------------------------------------------------------------------- fit

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        validation_split=0.0,
        validation_data=None,
        shuffle=True,
        class_weight=None,
        sample_weight=None,
        initial_epoch=0,
        steps_per_epoch=None,
        validation_steps=None,
        validation_batch_size=None,
        validation_freq=1,
        resume=None,
        fast_dev_run=False,
        overfit_batches=None,
    ):
        """Trains for a number of epochs, as `keras.Model.fit` does.

        Args:
            x: NumPy arrays, tensors, nests of them, a `tf.data.Dataset` of global batches, a
                `keras.utils.PyDataset`, a generator, a function of an `InputContext`, or what
                else Keras takes.
            y: Targets.
            batch_size: Rows of a global batch, over all replicas (default 32).
            epochs: Number of the last epoch plus one.
            verbose: "auto", 0, 1 or 2.
            callbacks: Keras callbacks.
            validation_split: Part of the arrays that is held back for validation.
            validation_data: Data that are evaluated after each epoch.
            shuffle: Whether arrays are shuffled each epoch.
            class_weight: Dict of weights by class.
            sample_weight: Weights by row (or finer).
            initial_epoch: Number of the first epoch.
            steps_per_epoch: Steps of an epoch.
            validation_steps: Steps of a validation.
            validation_batch_size: Rows of a global batch of the validation.
            validation_freq: Epochs between validations, or the epochs themselves.
            resume: None; a directory of checkpoints, whose newest is resumed from where there
                is one; or "auto" for the directory of the `kr.callbacks.Checkpoint`.
            fast_dev_run: True runs one step of training and of validation, to find mistakes fast.
                Callbacks that write a run's files are left out, and nothing is resumed.
            overfit_batches: An int: an epoch is the first so many batches, in the same order and
                with the same rows each time.

        Returns:
            A `keras.callbacks.History`.
        """
        self._require_compiled("fit")
        check_fit(
            epochs,
            initial_epoch,
            verbose,
            compat.as_callbacks(callbacks),
            validation_split,
            validation_freq,
            shuffle,
        )
        check_class_weight(class_weight)
        self._models.refresh()
        if fast_dev_run:
            epochs, steps_per_epoch, validation_steps = initial_epoch + 1, 1, 1
            validation_freq, resume = 1, None
            callbacks = without_writers(callbacks, say=verbose != 0 and self.plan.is_chief)
        if overfit_batches is not None:
            check_positive("overfit_batches", overfit_batches)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = compat.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        source = self._engine.training_source(x, steps_per_epoch) or self._source(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle and overfit_batches is None,
            class_weight=class_weight,
        )
        if overfit_batches is not None:
            source.keep_first(overfit_batches, repeat=steps_per_epoch is not None)
        if self._planning is not None:
            self._planning.finish(self, x, y, sample_weight, source)
        stream = Stream(source, steps_per_epoch)
        validation = None
        if validation_data is not None:
            validation = Stream(
                self._source(
                    *compat.unpack(validation_data),
                    batch_size=batch_size
                    if validation_batch_size is None
                    else validation_batch_size,
                    steps=validation_steps,
                    argument="validation_data",
                ),
                validation_steps,
                "validation_steps",
            )
        session, models = self._session, self._models
        with (
            models.weights_go_home(),
            models.routed_to(self),
            worker_files(callbacks, models.host, session.plan),
            self._engine.named_losses(),
        ):
            self._check_agreement(stream, validation, epochs)
            if self._is_wanted("wants_gradient_norm", callbacks):
                session.phases.want_gradient_norms()
            # Work of other devices is queued, and a clock in the loop would time the queueing.
            on_cpus = all(device.startswith("CPU") for device in session.plan.devices)
            if self._is_wanted("wants_times", callbacks) and on_cpus:
                session.phases.want_times()
            phase = session.phases.get("train", source.element_spec)
            session.plan = session.plan.with_details(**source.describe(session.plan))
            callbacks = self._callback_list(callbacks, verbose, epochs, stream, add_history=True)
            listed = compat.callbacks_of(callbacks)
            params = dict(models.host.history.params or {})
            for callback in listed:
                if callback.params is not None:
                    callback.params.update(trainer=self, num_replicas=self.num_replicas)
            streams = {"train": stream}
            if validation is not None:
                streams["validation"] = validation
            resumed = session.saver.prepare(resume, listed, phase, streams)
            source.reseed(session.shuffle_seed)
            if self._engine.num_workers > 1 and session.plan.is_chief and verbose != 0:
                reads = source.read_by_each(session.plan)
                print(f"Sharding: each worker reads {reads}.", file=sys.stderr)
            epochs = range(initial_epoch, epochs)
            session.training = True
            try:
                fit_epochs(
                    session, phase, stream, validation, callbacks, epochs, validation_freq, resumed
                )
            finally:
                session.training = False
                session.saver.finish()
        self.history = models.host.history
        self.history.params = params  # as Keras gives them, for whoever writes them down
        return self.history

    def _callback_list(self, callbacks, verbose, epochs, stream, **options):
        is_chief = self.plan.is_chief  # one progress bar for all workers
        return compat.callback_list(
            callbacks,
            add_progbar=verbose != 0 and is_chief,
            verbose=verbose if is_chief else 0,
            epochs=epochs,
            steps=stream.steps_per_epoch,
            model=self._models.host,
            **options,
        )

    def _is_wanted(self, what, callbacks):
        """Whether a callback of some worker has a true attribute of this name."""
        wanted = (getattr(callback, what, False) for callback in compat.as_callbacks(callbacks))
        return self._engine.agree(0, any(wanted))[1]

    def _check_agreement(self, stream, validation, epochs):
        """Workers that were started differently get an error that names the difference."""
        if self._engine.num_workers == 1:
            return
        facts = {
            "the layers of the model": [
                type(layer).__name__ for layer in compat.flatten_layers(self._models.host)
            ],
            "the optimizers": [
                f"{name}: {type(optimizer).__name__}"
                for name, optimizer in self._session.optimizers.items()
            ],
            "the data's shapes and types": str(stream.source.element_spec[1]),
            "the batch size": getattr(stream.source, "batch_size", None),
            "the steps per epoch": stream.steps_per_epoch,
            "the steps of a validation": None if validation is None else validation.steps_per_epoch,
            "the number of epochs": epochs,
        }
        workers.check_agreement("fit", facts, self._engine)

    # --------------------------------------------------------------------------------- evaluate

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size=None,
        verbose="auto",
        sample_weight=None,
        steps=None,
        callbacks=None,
        return_dict=False,
    ):
        """Returns loss and metrics over all rows, as `keras.Model.evaluate` does.

        Args:
            x: Data, as in `fit`.
            y: Targets.
            batch_size: Rows of a global batch (default 32).
            verbose: "auto", 0, 1 or 2.
            sample_weight: Weights by row.
            steps: Steps, or None for all data.
            callbacks: Keras callbacks.
            return_dict: Whether a dict is returned instead of a list.

        Returns:
            A number, a list of numbers, or a dict.
        """
        self._require_compiled("evaluate")
        self._models.refresh()
        source = self._source(x, y, sample_weight, batch_size=batch_size, steps=steps)
        stream = Stream(source, steps, "steps")
        callbacks = self._callback_list(callbacks, verbose, 1, stream)
        with keeping_metrics(self._session), self._engine.named_losses():
            logs = compat.pythonify(evaluate_stream(self._session, stream, callbacks))
        return logs if return_dict else compat.flatten_metrics_in_order(self._models.host, logs)

    # ---------------------------------------------------------------------------------- predict

    def predict(self, x, batch_size=None, verbose="auto", steps=None, callbacks=None):
        """Returns the outputs of exactly the rows that went in, in order, as NumPy arrays.

        Args:
            x: Data, as in `fit`.
            batch_size: Rows of a global batch (default 32).
            verbose: "auto", 0, 1 or 2.
            steps: Steps, or None for all data.
            callbacks: Keras callbacks.

        Returns:
            The structure of the model's outputs, with one array per output.
        """
        check_eager("predict")
        self._models.refresh()
        stream = Stream(self._source(x, batch_size=batch_size, steps=steps), steps, "steps")
        callbacks = self._callback_list(callbacks, verbose, 1, stream)
        with self._engine.named_losses():
            return join_outputs(predict_stream(self._session, stream, callbacks))

    # --------------------------------------------------------------------------------- on batch

    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, return_dict=False):
        """Runs one step on one global batch, as `keras.Model.train_on_batch` does."""
        self._require_compiled("train_on_batch")
        check_class_weight(class_weight)
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError(
                    "`sample_weight` and `class_weight` cannot be given together. Received: both"
                )
            sample_weight = compat.class_weights_to_sample_weights(y, class_weight)
        element, spec = self._element(x, y, sample_weight)
        phase = self._session.phases.get("train", spec)
        window = self._session.window
        with self._models.weights_go_home(), self._engine.named_losses():
            phase.reader.reset()
            phase.loop.one(element, window.steps)
            window.advance(1)
            return self._on_batch_result(phase, return_dict)

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """Evaluates one global batch, as `keras.Model.test_on_batch` does."""
        self._require_compiled("test_on_batch")
        element, spec = self._element(x, y, sample_weight)
        phase = self._session.phases.get("test", spec)
        with keeping_metrics(self._session), self._engine.named_losses():
            phase.reader.reset()
            phase.loop.one(element)
            return self._on_batch_result(phase, return_dict)

    def predict_on_batch(self, x):
        """Predicts one global batch, as `keras.Model.predict_on_batch` does."""
        element, spec = self._element(x)
        with self._engine.named_losses():
            return join_outputs([self._session.phases.get("predict", spec).loop.one(element)])

    def _on_batch_result(self, phase, return_dict):
        logs = compat.pythonify(self._session.read(phase.reader))
        return logs if return_dict else compat.flatten_metrics_in_order(self._models.host, logs)

    def _element(self, x, y=None, sample_weight=None):
        self._models.refresh()
        source = self._source(x, y, sample_weight, batch_size=2**31 - 1)
        return next(source.iterator(0)), source.element_spec

    def verify(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        class_weight=None,
        replicas=(2, 4),
        batch_size=None,
        steps=3,
        verbose=1,
        timeout=600,
    ):
        """Trains this model and step on 1 and N simulated devices, and explains any difference.

        A few steps are run from the same weights, with the last batch cut to an uneven number of
        rows. Loss, gradients, weights and metrics are compared. Where they differ, suspects are
        switched off one at a time (local BatchNormalization, random numbers), and what is left is
        followed back to the line of code in which rows of one replica are taken for all rows.

        It runs in a process of its own, eagerly, on CPUs; this trainer is left as it is. The build
        function (or model), the step, and what they refer to must be importable there, or
        picklable by cloudpickle.

        Args:
            x: Data, as in `fit`; a few batches are taken.
            y: Targets.
            sample_weight: Weights by row (or finer).
            class_weight: Dict of weights by class.
            replicas: Numbers of replicas, each at least 2.
            batch_size: Rows of a global batch (default 32).
            steps: Steps of each run.
            verbose: Whether the report is printed.
            timeout: Seconds after which the process is ended.

        Returns:
            A `keras_replicator.verify.Report`: `equal`, `causes`, `comparisons`; `print` it.

        Raises:
            ValueError: When an argument is wrong.
            keras_replicator.verify.VerifyError: When the functions cannot be sent to another
                process, or the step fails there.

        Example:

        ```python
        report = trainer.verify(x, y, replicas=(2, 4))
        assert not report.mistakes, report
        ```
        """
        from keras_replicator.verify.job import make_job
        from keras_replicator.verify.process import run

        self._require_compiled("verify")
        host = self._models.host
        job = make_job(
            self.given,
            x,
            y,
            sample_weight,
            class_weight=class_weight,
            replicas=replicas,
            batch_size=batch_size,
            steps=steps,
            weights=host.get_weights() if host.built else None,
        )
        report = run(job, timeout)
        if verbose and self.plan.is_chief:
            print(report)
        return report

    def measure(self, x, y=None, sample_weight=None, *, batch_size=None, rows=None):
        """Measures what a step of this trainer needs, for forecasts of other hardware.

        Steps are really run, for some seconds, and everything is put back afterwards. Measure on
        one replica (`devices=1`): simulated devices share the cores of one CPU.

        Args:
            x: Data, as in `fit`.
            y: Targets.
            sample_weight: Weights by row.
            batch_size: Rows of the global batch (default 32, or those of the data set's batches).
            rows: Rows of the batch that is measured; default, the global batch. Where one device
                cannot take that, give what a replica will get.

        Returns:
            A `keras_replicator.scaling.Profile`, which `trainer.plan.on(…)` uses from now on.

        Example:

        >>> import keras, numpy as np
        >>> import keras_replicator as kr
        >>> trainer = kr.ReplicatedTrainer(
        ...     lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), devices=1
        ... )
        >>> trainer.compile(optimizer="sgd", loss="mse")
        >>> profile = trainer.measure(np.ones((8, 2)), np.ones((8, 1)), batch_size=8)
        >>> profile.update_bytes  # a kernel of 2 and a bias, in float32
        12
        >>> trainer.plan.on(gpus=2, bandwidth="25GB/s").rows_per_replica
        (4, 4)
        """
        from keras_replicator import profiling

        sample, spec, count = self.sample_rows(x, y, sample_weight)
        if batch_size is None:
            batch_size = 32 if count is not None else int(count_rows(sample))
        check_positive("batch_size", batch_size)
        profile = profiling.measure(self._session, sample, spec, int(batch_size), rows)
        self._session.plan = dataclasses.replace(self._session.plan, profile=profile)
        return profile

    def sample_rows(self, x, y=None, sample_weight=None):
        """Returns `(batch, element spec, rows)`: rows to make trial batches of. Not for users.

        Arrays give all their rows; other data their first batch, and None for the number.
        """
        self._require_compiled("fit")
        source = self._source(x, y, sample_weight, batch_size=2**31 - 1)
        _, batch, *_ = next(source.iterator(0))
        return batch, source.element_spec, getattr(source, "num_rows", None)

    # -------------------------------------------------------------------------------------- run

    def run(self, fn, *inputs):
        """Runs `fn` once per replica: TF-Replicator's `run`.

        Args:
            fn: Function of the replica's inputs; may call `kr.replica`'s collectives.
            *inputs: Nests of tensors that are split by row, or `kr.PerReplica([...])`, which gives
                each replica a value of its own.

        Returns:
            A list with one nest of outputs per replica of this worker.

        Example:

        >>> import keras, keras_replicator as kr
        >>> build = lambda: keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> trainer = kr.ReplicatedTrainer(build, devices=1)
        >>> [float(value) for value in trainer.run(lambda: kr.replica.all_sum(2.0))]
        [2.0]
        """
        self._models.refresh()
        compilation = self._session.compilation
        run_eagerly = compilation is not None and compilation.run_eagerly
        with self._engine.named_losses():
            return self._engine.run(fn, inputs, run_eagerly)

    # ------------------------------------------------------------------------------------- files

    def save(self, filepath, overwrite=True, **kwargs):
        """Saves the model, as `keras.Model.save` does; in a job of workers the chief writes."""
        if not self.plan.is_chief:
            return None
        self._models.refresh()
        return self._models.host.save(filepath, overwrite=overwrite, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves the weights, as `keras.Model.save_weights` does; of workers the chief writes."""
        if not self.plan.is_chief:
            return None
        self._models.refresh()
        return self._models.host.save_weights(filepath, overwrite=overwrite, **kwargs)

    def load_weights(self, filepath, **kwargs):
        """Loads weights on all replicas, as `keras.Model.load_weights` does."""
        with self._engine.scope():
            self._models.host.load_weights(filepath, **kwargs)
        self._models.give_back()

    def export(self, filepath, **kwargs):
        """Writes a SavedModel for serving, as `keras.Model.export` does; the chief writes."""
        if not self.plan.is_chief:
            return None
        self._models.refresh()
        return self._models.plain().export(filepath, **kwargs)

    def summary(self, **kwargs):
        """Prints the model's summary, as `keras.Model.summary` does."""
        return self._models.host.summary(**kwargs)

    # ------------------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, directory, keep=None):
        """Writes the whole state of the run: weights, optimizers, random streams, position.

        Inside of a callback the checkpoint is written at the end of the current call, when every
        callback has run. In a job of workers all must call it; the chief writes.

        Args:
            directory: Folder of the run's checkpoints.
            keep: How many of the newest checkpoints stay, or None for all.

        Raises:
            keras_replicator.checkpoints.CheckpointError: When the disk does not take it; earlier
                checkpoints stay whole.
        """
        if keep is not None:
            check_positive("keep", keep)
        self._models.refresh()
        self._session.saver.save(directory, keep)

    def preempt(self):
        """Ends training at the next step on all workers: saved, with exit code 75.

        What a signal handler calls; kr.callbacks.Checkpoint does it for SIGTERM.
        """
        self._session.saver.preempt()

    def restore_checkpoint(self, directory):
        """Takes the whole state from the newest complete checkpoint of a folder.

        The number of replicas may differ from that of the run that wrote it.

        Args:
            directory: Folder of a run's checkpoints, or one checkpoint.

        Raises:
            keras_replicator.checkpoints.CheckpointError: When there is none, or it does not fit.
        """
        self._require_compiled("restore_checkpoint")
        self._session.saver.restore(directory)

    def _source(self, x, y=None, sample_weight=None, **options):
        check_input(options.get("argument", "x"), x)
        with self._engine.named_losses():
            return make_source(
                x,
                y,
                sample_weight,
                seed=self._session.shuffle_seed,
                shard=self._engine.shard,
                strategy=self.strategy,
                exchange=functools.partial(workers.exchange, engine=self._engine),
                **options,
            )
