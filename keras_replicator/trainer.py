"""`ReplicatedTrainer`: a Keras model and its step, trained on any number of replicas.

This is the only file that composes the others: plan -> engine -> data -> step -> loop -> logs.
"""

import contextlib
import inspect
import os

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat, copies, plan as plans, replica
from keras_replicator import steps as _steps  # noqa: F401 - teaches Keras the replica's semantics
from keras_replicator.cluster import check_expected_workers, detect_cluster
from keras_replicator.data.rows import slice_rows
from keras_replicator.data.sources import make_source
from keras_replicator.engines.factory import make_engine
from keras_replicator.epochs import Hooks, WindowPosition, run_epoch
from keras_replicator.hardware import configured_hardware, detect_hardware, short_name
from keras_replicator.model_group import ModelGroup
from keras_replicator.pacing import Pacing
from keras_replicator.saver import Saver
from keras_replicator.shared_files import worker_files
from keras_replicator.steps import metrics as step_metrics
from keras_replicator.steps import normalization, supervised
from keras_replicator.steps.logs import StepLogs
from keras_replicator.steps.optimizers import GradientWindow
from keras_replicator.stream import Stream

# What callbacks call on `self.model`.
_ROUTED = ("predict", "evaluate", "predict_on_batch", "test_on_batch", "train_on_batch")


class ReplicatedTrainer:
    """Trains a Keras model with the same numbers on any number of replicas.

    Args:
        model: A function without arguments that builds a `keras.Model` (or a dict of them), or a
            `keras.Model`. A model object gets the trained weights back when `fit` ends.
        strategy: "auto", "one_device", "mirrored", "multi_worker", "tpu", or a
            `tf.distribute.Strategy`.
        devices: None for all devices that were found, an int for that many, or names such as
            `["GPU:0", "GPU:1"]`.
        layout: Model parallelism; not available under this version's strategies.
        train_step: Optional `fn(model, batch) -> logs`, run once per replica.
        test_step: Optional `fn(model, batch) -> logs`.
        predict_step: Optional `fn(model, batch) -> outputs`.
        expected_workers: The number of workers that the job must have, or None.
        peer_timeout: Seconds until a lost worker is an error.
        start_timeout: Seconds until a missing worker is an error.
        max_staleness: For parameter servers only.
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
        seed=None,
    ):
        for name, value in (("layout", layout), ("max_staleness", max_staleness)):
            if value is not None:
                raise ValueError(
                    f"`{name}` needs a strategy that this version does not have (a mesh or "
                    f"parameter servers). Leave it out. Received: {name}={value!r}"
                )
        for name, step in (
            ("train_step", train_step),
            ("test_step", test_step),
            ("predict_step", predict_step),
        ):
            _check_step(name, step)
        self.peer_timeout = peer_timeout
        self.start_timeout = start_timeout
        self._seed = seed
        self._plan, self._engine = _make(
            strategy, devices, expected_workers, peer_timeout, start_timeout
        )
        self._train_step = train_step
        self._test_step = test_step
        self._predict_step = predict_step
        if seed is not None:
            keras.utils.set_random_seed(seed)
        compat.ensure_global_seed_generator()
        self._user_model = None
        self._models = self._make_models(model)
        self._host = (
            ModelGroup(self._models) if isinstance(self._models, dict) else self._models
        )
        self._compiled = False
        self._optimizers = {}
        self._loops = {}
        self._window = WindowPosition(1)
        self._saver = Saver(self)
        self._epochs_seen = 0
        self._training = False
        self._shuffle_seed = seed if seed is not None else int(np.random.randint(2**31))
        self.history = None
        self._adopt_compiled()

    # ------------------------------------------------------------------------------ properties

    @property
    def plan(self):
        """The `Plan`: what runs where, and why."""
        return self._plan

    @property
    def model(self):
        """The Keras model that is trained, or the dict of models."""
        return self._models

    @property
    def num_replicas(self):
        """Replicas that take part in one update."""
        return self._engine.num_replicas

    @property
    def strategy(self):
        """The `tf.distribute.Strategy`, or None where one device needs none."""
        return self._engine.strategy

    @property
    def optimizers(self):
        """Dict of the optimizers, by the names under which `compile` took them."""
        return self._optimizers

    # ---------------------------------------------------------------------------------- models

    def _make_models(self, model):
        if isinstance(model, keras.Model):
            copies.refuse_foreign_strategy(model, self.strategy)
            if self.num_replicas == 1 or _belongs_to(model, self.strategy):
                return model
            self._user_model = model
            with self._engine.scope():
                return copies.copy_model(model)
        if not callable(model):
            raise TypeError(
                "`model` must be a keras.Model, or a function without arguments that builds one "
                f"(or a dict of models). Received: model={model!r}"
            )
        with self._engine.scope():
            built = model()
        models = built if isinstance(built, dict) else {"model": built}
        for name, value in models.items():
            if not isinstance(value, keras.Model):
                raise TypeError(
                    "The function passed as `model` must return a keras.Model or a dict of them. "
                    f"Received: {name}={value!r}"
                )
        if self.num_replicas > 1:
            for value in models.values():
                if any(not compat.is_distributed(variable) for variable in value.weights):
                    raise ValueError(
                        f"The function passed as `model` returned '{value.name}', whose weights "
                        "were made before it was called. Build the whole model inside of the "
                        "function, or pass the model object itself: ReplicatedTrainer(model)."
                    )
        return dict(built) if isinstance(built, dict) else built

    @contextlib.contextmanager
    def _predictions_routed(self):
        """Lets callbacks that call `self.model.predict` or `evaluate` run through the trainer."""
        names = () if isinstance(self._models, dict) else _ROUTED
        for name in names:
            object.__setattr__(self._host, name, getattr(self, name))
        try:
            yield
        finally:
            if self.num_replicas == 1:
                for name in names:
                    object.__delattr__(self._host, name)

    @contextlib.contextmanager
    def _weights_go_home(self):
        """Gives the user's model object the trained weights, also after an exception."""
        try:
            yield
        finally:
            if self._user_model is not None:
                copies.copy_weights(self._models, self._user_model)

    # --------------------------------------------------------------------------------- compile

    def _adopt_compiled(self):
        """Takes over the `compile` of a model object that came compiled."""
        origin = self._user_model if self._user_model is not None else self._host
        if isinstance(self._models, dict) or not getattr(origin, "compiled", False):
            return
        config = compat.compile_config(origin)
        if config is None or not _has_own_compile_only(origin):
            return
        config["optimizer"] = origin.optimizer
        config = {name: value for name, value in config.items() if value is not None}
        self.compile(**config)

    def compile(
        self,
        optimizer="rmsprop",
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
        _check_positive("gradient_accumulation_steps", gradient_accumulation_steps)
        if steps_per_execution != "auto":
            _check_positive("steps_per_execution", steps_per_execution)
        self._steps_per_execution = steps_per_execution
        self._run_eagerly = bool(run_eagerly)
        self._engine.sync_batch_norm = bool(sync_batch_norm)
        given = {
            "loss": loss,
            "metrics": copies_of_metrics(self, metrics),
            "weighted_metrics": copies_of_metrics(self, weighted_metrics),
            "loss_weights": loss_weights,
        }
        given = {name: value for name, value in given.items() if value is not None}
        with self._engine.scope():
            optimizers = self._copy_optimizers(optimizer, more)
            arguments = {**given, **more, **{k: v for k, v in optimizers.items() if k in more}}
            if isinstance(optimizer, dict) and not _is_config(optimizer):
                self._optimizers = {name: optimizers[name] for name in optimizer}
                arguments["optimizer"] = None
                self._host.replicated_optimizers = list(self._optimizers.values())
            elif _takes(self._host, "optimizer"):
                arguments["optimizer"] = optimizers["optimizer"]
            for name, value in (
                ("run_eagerly", run_eagerly),
                ("jit_compile", False if run_eagerly else jit_compile),
                ("steps_per_execution", 1),
            ):
                if _takes(self._host, name):
                    arguments[name] = value
            self._host.compile(**arguments)
        if not (isinstance(optimizer, dict) and not _is_config(optimizer)):
            self._optimizers = self._found_optimizers(more)
        self._jit = self._resolve_jit(jit_compile)
        self._accumulation = self._resolve_accumulation(gradient_accumulation_steps)
        self._compiled = True
        self._loops = {}
        self._window = WindowPosition(self._accumulation)
        self._plan = self._plan.with_details(**self._describe())

    def _copy_optimizers(self, optimizer, more):
        named = dict(optimizer) if isinstance(optimizer, dict) and not _is_config(optimizer) else {
            "optimizer": optimizer
        }
        named.update(
            {name: v for name, v in more.items() if isinstance(v, keras.optimizers.Optimizer)}
        )
        variables = None
        if not isinstance(self._models, dict) and self._models.built:
            variables = self._models.trainable_variables
        result = {}
        for name, value in named.items():
            same_place = self.num_replicas == 1 or (
                isinstance(value, keras.optimizers.Optimizer)
                and compat.strategy_of(value.iterations) is self.strategy
            )
            if same_place:
                result[name] = keras.optimizers.get(value)
            else:
                result[name] = copies.copy_optimizer(value, variables)
        return result

    def _found_optimizers(self, more):
        """The optimizers of a compiled model, by the arguments of its own `compile`."""
        found = {}
        for name in more:
            value = getattr(self._host, name, None)
            if isinstance(value, keras.optimizers.Optimizer):
                found[name] = value
        own = getattr(self._host, "optimizer", None)
        if isinstance(own, keras.optimizers.Optimizer):
            found = {"optimizer": own, **found}
        return found

    def _resolve_accumulation(self, steps):
        for name, optimizer in self._optimizers.items():
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            own = inner.gradient_accumulation_steps or 1
            if own > 1 and steps > 1 and own != steps:
                raise ValueError(
                    "`gradient_accumulation_steps` is set twice, to different numbers. Set it in "
                    "compile() or on the optimizer, not in both. Received: "
                    f"gradient_accumulation_steps={steps}, and {own} on the optimizer '{name}'"
                )
            steps = max(steps, own)
        return steps

    def _resolve_jit(self, jit_compile):
        if jit_compile not in (True, False, None, "auto"):
            raise ValueError(
                f"`jit_compile` must be True, False or 'auto'. Received: jit_compile={jit_compile!r}"
            )
        if jit_compile == "auto":
            accelerated = not all(name.startswith("CPU") for name in self._plan.devices)
            custom = self._train_step is not None or compat.overridden(self._host, "train_step")
            return accelerated and not custom and not self._run_eagerly
        return bool(jit_compile) and not self._run_eagerly

    def _describe(self):
        several = self.num_replicas > 1
        clips = [
            f"{name}: {setting}={value}"
            for name, optimizer in self._optimizers.items()
            for setting in ("clipnorm", "global_clipnorm", "clipvalue")
            if (value := getattr(getattr(optimizer, "inner_optimizer", optimizer), setting, None))
        ]
        return {
            "loss": "mean over the rows of the global batch"
            + ("; masks and weights divide by global sums" if several else ""),
            "scalar losses": "on the global batch (gathered rows)" if several else "as in Keras",
            "clipping": (", ".join(clips) + ", on the averaged gradient") if clips else "none",
            "update": f"every {self._accumulation} steps" if self._accumulation > 1 else "every step",
            "batch normalization": "statistics over all replicas"
            if self._engine.sync_batch_norm
            else "each replica's rows; moving statistics averaged by rows",
            "precision": getattr(self._host.dtype_policy, "name", "float32"),
            "XLA": "forward and backward pass" if self._jit else "off",
            "random streams": "one per replica" + (
                f", from seed {self._seed}" if self._seed is not None else ""
            ),
            "shared files": "written by the chief" if self._plan.num_workers > 1 else "written here",
        }

    def _require_compiled(self, method):
        if not self._compiled:
            raise ValueError(
                f"Call trainer.compile(optimizer=…, loss=…) before trainer.{method}(). "
                f"Received: {method}() on a trainer that has not been compiled"
            )

    # ----------------------------------------------------------------------------------- steps

    def _train_loop(self, spec):
        return self._loop("train", spec)

    def _loop(self, phase, spec):
        """Returns the loop of a phase, built for elements of `spec`."""
        if phase not in self._loops:
            window = None
            if phase == "train" and self._accumulation > 1:
                window = GradientWindow(self._accumulation, self._engine.scope)
            logs = StepLogs()
            step, custom = self._step_of(phase)
            replica_step = self._on_replica(step, phase, window, logs, custom)
            self._loops[phase] = self._engine.make_loop(
                replica_step,
                add=logs.add if custom and phase != "predict" else None,
                collect=phase == "predict",
                window=window,
                scratch={"model": self._host},
                run_eagerly=self._run_eagerly_now(),
            )
            self._loops[phase].logs = logs if custom else None
            self._loops[phase].step = replica_step
            self._loops[phase].window = window
            self._loops[phase].built_for = None
        loop = self._loops[phase]
        if loop.built_for is None:
            self._engine.build(loop.step, spec, loop.window)
            step_metrics.prepare(compat.leaf_metrics(self._host))
            loop.built_for = spec
        return loop

    def _run_eagerly_now(self):
        return getattr(self, "_run_eagerly", False)

    def _step_of(self, phase):
        """Returns `(fn(batch) on a replica, whether its logs are the user's)`."""
        model, host = self._models, self._host
        given = {"train": self._train_step, "test": self._test_step, "predict": self._predict_step}
        if given[phase] is not None:
            function = given[phase]
            return (lambda batch: function(model, batch)), True
        own = f"{phase}_step"
        if compat.overridden(host, own):
            return getattr(host, own), True
        if isinstance(model, dict):
            raise ValueError(
                f"A trainer of several models needs `{own}=fn(models, batch)`. "
                f"Received: a dict of models and {own}=None"
            )
        if phase == "train":
            self._check_loss()
            return (
                lambda batch: supervised.train_step(host, batch, self._jit)
            ), compat.overridden(host, "compute_metrics")
        if phase == "test":
            return (
                lambda batch: supervised.test_step(host, batch)
            ), compat.overridden(host, "compute_metrics")
        return (lambda batch: supervised.predict_step(host, batch)), False

    def _check_loss(self):
        if compat.overridden(self._host, "compute_loss"):
            return
        if compat.compile_loss(self._host) is None and not self._may_add_losses():
            raise ValueError(
                "No loss to compute: pass `loss=` to trainer.compile(), or a model that calls "
                "`add_loss`. Received: loss=None"
            )

    def _may_add_losses(self):
        return True  # a layer's add_loss shows only when it is called

    def _on_replica(self, step, phase, window, logs, custom):
        """Wraps a step: statistics are averaged after it, its logs become sums."""

        def run(batch):
            current = replica.current()
            result = step(batch)
            if phase == "predict":
                return _own_rows(result, current)
            if phase == "train":
                normalization.average_statistics(self._statistics())
                if window is not None and not current.building:
                    window.add_rows()
            return logs.reduce_locally(result) if custom else {}

        return run

    def _statistics(self):
        models = self._models.values() if isinstance(self._models, dict) else [self._models]
        return [variable for model in models for variable in model.non_trainable_variables]

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
            resume: A directory of checkpoints to resume from, or None.
            fast_dev_run: True runs one step of everything, to find mistakes fast.
            overfit_batches: An int: trains on that many batches only, again and again.

        Returns:
            A `keras.callbacks.History`.
        """
        self._require_compiled("fit")
        if fast_dev_run:
            epochs, steps_per_epoch, validation_steps = initial_epoch + 1, 1, 1
        if overfit_batches is not None:
            _check_positive("overfit_batches", overfit_batches)
            steps_per_epoch = min(steps_per_epoch or overfit_batches, overfit_batches)
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = compat.train_validation_split(
                (x, y, sample_weight), validation_split
            )
        source = self._source(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle and overfit_batches is None,
            class_weight=class_weight,
        )
        stream = Stream(source, steps_per_epoch)
        validation = None
        if validation_data is not None:
            validation_x, validation_y, validation_weight = compat.unpack(validation_data)
            validation = Stream(
                self._source(
                    validation_x,
                    validation_y,
                    validation_weight,
                    batch_size=validation_batch_size or batch_size,
                    steps=validation_steps,
                    argument="validation_data",
                ),
                validation_steps,
                "validation_steps",
            )
        loop = self._train_loop(source.element_spec)
        self._plan = self._plan.with_details(**_describe_batches(self, source))
        callbacks = compat.callback_list(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0 and self._plan.is_chief,
            verbose=verbose if self._plan.is_chief else 0,
            epochs=epochs,
            steps=stream.steps_per_epoch,
            model=self._host,
        )
        for callback in compat.callbacks_of(callbacks):
            if callback.params is not None:
                callback.params.update(trainer=self, num_replicas=self.num_replicas)
        resumed = self._saver.prepare(resume, compat.callbacks_of(callbacks), loop)
        source.reseed(self._shuffle_seed)
        with (
            self._weights_go_home(),
            self._predictions_routed(),
            worker_files(compat.callbacks_of(callbacks), self._host, self._plan),
            self._engine.named_losses(),
        ):
            self._training = True
            try:
                self._fit_epochs(
                    loop,
                    stream,
                    validation,
                    callbacks,
                    range(initial_epoch, epochs),
                    validation_freq,
                    resumed,
                )
            finally:
                self._training = False
                self._saver.finish()
        self.history = self._host.history
        return self._host.history

    def _fit_epochs(self, loop, stream, validation, callbacks, epochs, validation_freq, resumed):
        host, engine, saver = self._host, self._engine, self._saver
        pacing = Pacing(self._steps_per_execution, compat.callbacks_of(callbacks))
        reader = _LogReader(self, loop)
        hooks = Hooks("train", callbacks, host, reader.read, self._looked_at(callbacks, pacing))
        compat.reset_initial_epoch(host)
        callbacks.on_train_begin()
        first = compat.take_initial_epoch(host) or epochs.start
        start = 0
        if resumed is not None:
            first, start = resumed.epoch, resumed.step
            resumed.restore_callbacks(compat.callbacks_of(callbacks))
        logs, made = None, 0 if resumed is None else resumed.total_steps - start
        for epoch in range(first, epochs.stop):
            if not start:
                reader.reset()
            callbacks.on_epoch_begin(epoch)
            stream.begin_epoch(max(epoch, self._epochs_seen), start)
            steps, rows = run_epoch(
                engine,
                loop,
                stream,
                pacing,
                hooks,
                start=start,
                made=made,
                window=self._window,
                boundary=lambda step, epoch=epoch, made=made: saver.at_step(
                    epoch, step, made + step
                ),
            )
            saver.leave_if_preempted()
            made, start = made + steps, 0
            self._window.flush(loop)
            logs = reader.read()
            stream.end_epoch()
            self._epochs_seen = max(epoch, self._epochs_seen) + 1
            if validation is not None and compat.should_eval(host, epoch, validation_freq):
                results = self._evaluate(validation, callbacks)
                logs.update({f"val_{name}": value for name, value in results.items()})
            for callback in compat.callbacks_of(callbacks):
                if callback.params is not None:
                    callback.params.update(rows_seen=rows)
            callbacks.on_epoch_end(epoch, logs)
            saver.at_epoch_end(epoch, made)
            if engine.agree(0, hooks.stopped())[1]:
                hooks.stop()
                break
        self._finalize_optimizers(len(epochs))
        callbacks.on_train_end(logs=logs)
        engine.agree(0, False)  # nobody leaves while others still need it

    def _looked_at(self, callbacks, pacing):
        """Whether some worker's callbacks want the logs of each call."""
        progress = any(
            isinstance(callback, keras.callbacks.ProgbarLogger) and callback.verbose not in (0, 2)
            for callback in compat.callbacks_of(callbacks)
        )
        return self._engine.agree(0, pacing.watched or progress)[1]

    def _build_optimizer(self):
        """Builds the optimizer of a built model, so that a checkpoint can fill its slots."""
        own = getattr(self._host, "optimizer", None)
        if isinstance(own, keras.optimizers.Optimizer) and not own.built:
            with self._engine.scope():
                own.build(self._host.trainable_variables)

    def _finalize_optimizers(self, epochs):
        if epochs <= 0:
            return
        with self._engine.scope():
            own = getattr(self._host, "optimizer", None)
            if isinstance(own, keras.optimizers.Optimizer):
                own.finalize_variable_values(self._host.trainable_weights)

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
        stream = Stream(
            self._source(x, y, sample_weight, batch_size=batch_size, steps=steps), steps, "steps"
        )
        callbacks = compat.callback_list(
            callbacks,
            add_progbar=verbose != 0 and self._plan.is_chief,
            verbose=verbose if self._plan.is_chief else 0,
            epochs=1,
            steps=stream.steps_per_epoch,
            model=self._host,
        )
        with self._keeping_training_state(), self._engine.named_losses():
            logs = compat.pythonify(self._evaluate(stream, callbacks))
        if return_dict:
            return logs
        return compat.flatten_metrics_in_order(self._host, logs)

    def _evaluate(self, stream, callbacks):
        loop = self._loop("test", stream.source.element_spec)
        pacing = Pacing(self._steps_per_execution, compat.callbacks_of(callbacks), "test")
        reader = _LogReader(self, loop)
        hooks = Hooks("test", callbacks, self._host, reader.read, self._looked_at(callbacks, pacing))
        callbacks.on_test_begin()
        reader.reset()
        stream.begin_epoch(0)
        run_epoch(self._engine, loop, stream, pacing, hooks)
        logs = reader.read()
        stream.end_epoch()
        callbacks.on_test_end(logs)
        return logs

    @contextlib.contextmanager
    def _keeping_training_state(self):
        """An evaluation that a callback asks for in mid-epoch leaves the epoch's metrics alone."""
        if not self._training:
            yield
            return
        copies_of = [
            compat.replica_copies(variable)
            for metric in compat.leaf_metrics(self._host)
            for variable in metric.variables
        ]
        kept = [[copy.numpy() for copy in group] for group in copies_of]
        try:
            yield
        finally:
            for group, values in zip(copies_of, kept):
                for copy, value in zip(group, values):
                    copy.assign(value)

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
        stream = Stream(self._source(x, batch_size=batch_size, steps=steps), steps, "steps")
        callbacks = compat.callback_list(
            callbacks,
            add_progbar=verbose != 0 and self._plan.is_chief,
            verbose=verbose if self._plan.is_chief else 0,
            epochs=1,
            steps=stream.steps_per_epoch,
            model=self._host,
        )
        loop = self._loop("predict", stream.source.element_spec)
        steps_per_execution = getattr(self, "_steps_per_execution", "auto")
        pacing = Pacing(steps_per_execution, compat.callbacks_of(callbacks), "predict")
        hooks = Hooks("predict", callbacks, self._host)
        callbacks.on_predict_begin()
        stream.begin_epoch(0)
        with self._engine.named_losses():
            run_epoch(self._engine, loop, stream, pacing, hooks)
        stream.end_epoch()
        callbacks.on_predict_end()
        return _join_outputs(hooks.outputs)

    # --------------------------------------------------------------------------------- on batch

    def train_on_batch(
        self, x, y=None, sample_weight=None, class_weight=None, return_dict=False
    ):
        """Runs one step on one global batch, as `keras.Model.train_on_batch` does."""
        self._require_compiled("train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError(
                    "`sample_weight` and `class_weight` cannot be given together. Received: both"
                )
            sample_weight = compat.class_weights_to_sample_weights(y, class_weight)
        element, spec = self._element(x, y, sample_weight)
        loop = self._train_loop(spec)
        with self._weights_go_home():
            reader = _LogReader(self, loop)
            reader.reset()
            loop.one(element, self._window.steps)
            self._window.advance(1)
        return self._on_batch_result(reader, return_dict)

    def test_on_batch(self, x, y=None, sample_weight=None, return_dict=False):
        """Evaluates one global batch, as `keras.Model.test_on_batch` does."""
        self._require_compiled("test_on_batch")
        element, spec = self._element(x, y, sample_weight)
        loop = self._loop("test", spec)
        with self._keeping_training_state():
            reader = _LogReader(self, loop)
            reader.reset()
            loop.one(element)
            return self._on_batch_result(reader, return_dict)

    def predict_on_batch(self, x):
        """Predicts one global batch, as `keras.Model.predict_on_batch` does."""
        element, spec = self._element(x)
        outputs = self._loop("predict", spec).one(element)
        return _join_outputs([outputs])

    def _on_batch_result(self, reader, return_dict):
        logs = compat.pythonify(reader.read())
        return logs if return_dict else compat.flatten_metrics_in_order(self._host, logs)

    def _element(self, x, y=None, sample_weight=None):
        source = self._source(x, y, sample_weight, batch_size=2**31 - 1)
        return next(source.iterator(0)), source.element_spec

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
        with self._engine.named_losses():
            return self._engine.run(fn, inputs, self._run_eagerly_now())

    # ------------------------------------------------------------------------------------- files

    def save(self, filepath, overwrite=True, **kwargs):
        """Saves the model, as `keras.Model.save` does; in a job of workers the chief writes."""
        if not self._plan.is_chief:
            return None
        return self._host.save(filepath, overwrite=overwrite, **kwargs)

    def save_weights(self, filepath, overwrite=True, **kwargs):
        """Saves the weights, as `keras.Model.save_weights` does; of workers the chief writes."""
        if not self._plan.is_chief:
            return None
        return self._host.save_weights(filepath, overwrite=overwrite, **kwargs)

    def load_weights(self, filepath, **kwargs):
        """Loads weights on all replicas, as `keras.Model.load_weights` does."""
        with self._engine.scope():
            self._host.load_weights(filepath, **kwargs)
        if self._user_model is not None:
            copies.copy_weights(self._models, self._user_model)

    def export(self, filepath, **kwargs):
        """Writes a SavedModel for serving, as `keras.Model.export` does; the chief writes."""
        if not self._plan.is_chief:
            return None
        return self._host.export(filepath, **kwargs)

    def summary(self, **kwargs):
        """Prints the model's summary, as `keras.Model.summary` does."""
        return self._host.summary(**kwargs)

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
        self._saver.save(directory, keep)

    def preempt(self):
        """Ends training at the next step on all workers: saved, with exit code 75.

        What a signal handler calls; kr.callbacks.Checkpoint does it for SIGTERM.
        """
        self._saver.preempt()

    def restore_checkpoint(self, directory):
        """Takes the whole state from the newest complete checkpoint of a folder.

        The number of replicas may differ from that of the run that wrote it.

        Args:
            directory: Folder of a run's checkpoints, or one checkpoint.

        Raises:
            keras_replicator.checkpoints.CheckpointError: When there is none, or it does not fit.
        """
        self._require_compiled("restore_checkpoint")
        self._saver.restore(directory)

    # ------------------------------------------------------------------------------------ inside

    def _source(self, x, y=None, sample_weight=None, **options):
        return make_source(
            x,
            y,
            sample_weight,
            seed=self._shuffle_seed,
            shard=self._engine.shard,
            strategy=self.strategy,
            **options,
        )


class _LogReader:
    """Reads the values of a phase's logs; only when somebody needs them."""

    def __init__(self, trainer, loop):
        self._trainer = trainer
        self._loop = loop

    def reset(self):
        """Starts an epoch."""
        trainer = self._trainer
        with trainer._engine.cross_replica():
            trainer._host.reset_metrics()
        if self._loop.logs is not None:
            self._loop.logs.reset()

    def read(self):
        """Returns `{name: value}` over all replicas and workers."""
        trainer, logs = self._trainer, self._loop.logs
        if logs is None:
            return dict(trainer._engine.read(self._results()))
        totals = trainer._engine.sum_over_workers(logs.totals())
        return logs.values(totals, dict(trainer._engine.read(self._results())))

    def _results(self):
        """A compiled function that computes every metric's result across replicas."""
        loop, host = self._loop, self._trainer._host
        if getattr(loop, "results", None) is None:
            if loop.logs is None:

                def results():
                    return compat.metric_results(host)

            else:
                logs = loop.logs

                def results():
                    return {name: metric.result() for name, metric in logs.metrics.items()}

            eager = self._trainer._run_eagerly_now()
            loop.results = results if eager else compat.compiled(results)
        return loop.results


def copies_of_metrics(trainer, metrics):
    """Metrics made anew in the trainer's scope, unless one device needs no copy."""
    if metrics is None or trainer.num_replicas == 1:
        return metrics
    with trainer._engine.scope():
        return copies.copy_metrics(metrics)


def _make(strategy, devices, expected_workers, peer_timeout, start_timeout):
    """Returns `(plan, engine)`."""
    if isinstance(strategy, tf.distribute.Strategy):
        if devices is not None:
            raise ValueError(
                "`devices` and a strategy object exclude each other: the strategy has its devices. "
                f"Received: strategy={type(strategy).__name__}, devices={devices!r}"
            )
        names = tuple(short_name(name) for name in strategy.extended.worker_devices)
        plan = plans.Plan(
            "custom",
            names,
            strategy.num_replicas_in_sync,
            reasons=(
                ("strategy", f"the {type(strategy).__name__} that was passed"),
                ("devices", "of that strategy"),
            ),
        )
        return plan, make_engine(plan, strategy)
    cluster = detect_cluster(os.environ)
    check_expected_workers(cluster, expected_workers)
    several = cluster is not None and cluster.num_workers > 1
    hardware = configured_hardware() if several else detect_hardware()
    plan = plans.make_plan(hardware, cluster, strategy=strategy, devices=devices)
    return plan, make_engine(
        plan, cluster=cluster, peer_timeout=peer_timeout, start_timeout=start_timeout
    )


def _belongs_to(model, strategy):
    return bool(model.weights) and all(
        compat.strategy_of(variable) is strategy for variable in model.weights
    )


def _has_own_compile_only(model):
    return not compat.overridden(model, "compile")


def _is_config(optimizer):
    return "class_name" in optimizer


def _takes(model, argument):
    """Whether a model's `compile` takes an argument."""
    parameters = inspect.signature(type(model).compile).parameters
    return argument in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def _check_step(name, step):
    if step is None:
        return
    if not callable(step):
        raise TypeError(f"`{name}` must be a function fn(model, batch). Received: {name}={step!r}")
    if hasattr(step, "get_concrete_function"):
        raise ValueError(
            f"`{name}` is decorated with @tf.function, inside of which replicas cannot talk to "
            f"each other. Remove the decorator: the trainer compiles the step. Received: {step!r}"
        )


def _check_positive(name, value):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1. Received: {name}={value!r}")


def _own_rows(outputs, current):
    """Drops the output of the row that a replica without rows was given."""
    if not current.distributed or current.building:
        return outputs
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else slice_rows(leaf, 0, current.rows), outputs
    )


def _describe_batches(trainer, source):
    batch_size = getattr(source, "batch_size", None)
    if batch_size is None:
        return {"global batch": "as the data set gives it, split in order over replicas"}
    batch_size = min(batch_size, source.num_rows)
    rows = ", ".join(map(str, trainer.plan.rows_per_replica(batch_size)))
    return {"global batch": f"{batch_size} rows", "rows per replica": rows}


def _join_outputs(parts):
    """Concatenates the rows of many calls; ragged outputs stay ragged."""
    if not parts:
        raise ValueError("The data hold no batches, so there is nothing to predict.")

    def join(*leaves):
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], (tf.RaggedTensor, tf.SparseTensor)):
            joined = tf.concat(leaves, 0) if isinstance(leaves[0], tf.RaggedTensor) else (
                tf.sparse.concat(0, leaves)
            )
            return joined
        arrays = [np.asarray(leaf) for leaf in leaves]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=0)

    return tf.nest.map_structure(join, *parts)
