"""The models of a trainer: built in its scope, or made anew there from what the user passed."""

import contextlib
import zlib

import keras

from keras_replicator import compat, copies
from keras_replicator.checks import check_callable

# What callbacks call on `self.model`.
_ROUTED = ("predict", "evaluate", "predict_on_batch", "test_on_batch", "train_on_batch")


class ModelGroup(keras.Model):
    """Holds a dict of models, so that callbacks, metrics and weight files see them as one.

    Args:
        models: Dict of `keras.Model`, by name.
    """

    def __init__(self, models):
        super().__init__(name="models")
        self.models = models
        self.built = True

    def call(self, inputs):
        raise ValueError(
            "A group of models cannot be called as one. Pass `predict_step=fn(models, batch)`, or "
            "call trainer.model[name]."
        )


class Models:
    """What a trainer trains.

    Attributes:
        structure: The `keras.Model`, or the dict of models, that steps receive.
        host: The one Keras model that callbacks and files see.

    Args:
        model: What the user passed to the trainer.
        engine: The engine in whose scope the models live.
    """

    def __init__(self, model, engine):
        self._engine = engine
        self._original = None  # the user's model, where a copy of it is trained
        self._training = False
        self._known = ([], [])  # its weights' checksums and trainable flags at the last exchange
        if isinstance(model, keras.Model):
            self.structure = self._take_over(model)
        else:
            self.structure = self._build(model)
        self.host = ModelGroup(self.structure) if self.is_group else self.structure

    @property
    def is_group(self):
        """Whether there are several models."""
        return isinstance(self.structure, dict)

    @property
    def given(self):
        """The model as the user knows it: the object that was passed, or the one that was built."""
        return self.host if self._original is None else self._original

    def _take_over(self, model):
        copies.refuse_foreign_strategy(model, self._engine.strategy)
        if not self._engine.makes_anew or _belongs_to(model, self._engine):
            return model
        self._original = model
        self._known = (_checksums(model), _flags(model))
        return self._engine.make(lambda: copies.copy_model(model))

    def _build(self, function):
        if not callable(function):
            raise TypeError(
                "`model` must be a keras.Model, or a function without arguments that builds one "
                f"(or a dict of models). Received: model={function!r}"
            )
        check_callable("model", function, 0, "model(), without arguments")
        built = self._engine.make(function)
        if built == {}:
            raise TypeError(
                "The function passed as `model` must return a keras.Model or a dict of them. "
                "Received: {}"
            )
        for name, model in (built if isinstance(built, dict) else {"model": built}).items():
            if not isinstance(model, keras.Model):
                raise TypeError(
                    "The function passed as `model` must return a keras.Model or a dict of them. "
                    f"Received: {name}={model!r}"
                )
            if not all(map(self._engine.owns, model.weights)):
                raise ValueError(
                    f"The function passed as `model` returned '{model.name}', whose weights "
                    "were made before it was called. Build the whole model inside of the "
                    "function, or pass the model object itself: ReplicatedTrainer(model)."
                )
        return dict(built) if isinstance(built, dict) else built

    def copied(self):
        """Returns `(the user's model, its copy)`; the first is None where there is no copy."""
        return self._original, (None if self.is_group else self.host)

    def statistics(self):
        """Returns the non-trainable variables, which a step may change on each replica."""
        models = self.structure.values() if self.is_group else [self.structure]
        return [variable for model in models for variable in model.non_trainable_variables]

    def refresh(self):
        """Takes over what the user has changed in the model object since the last exchange."""
        if self._original is None or self._training:
            return
        checksums, flags = self._known
        now = _checksums(self._original), _flags(self._original)
        layers = zip(compat.flatten_layers(self._original), compat.flatten_layers(self.structure))
        for (original, layer), before, flag in zip(layers, flags, now[1]):
            if flag != before:
                layer.trainable = original.trainable
        weights = zip(self._original.weights, self.structure.weights)
        for (original, variable), before, checksum in zip(weights, checksums, now[0]):
            if checksum != before:
                variable.assign(original)
        self._known = now

    def plain(self):
        """Returns the model for a SavedModel: itself, or a copy whose weights have no parts."""
        return copies.copy_model(self.host) if self._engine.has_parts else self.host

    def give_back(self):
        """Gives the user's model object the trained weights."""
        if self._original is not None:
            copies.copy_weights(self.structure, self._original)
            self._known = (_checksums(self._original), self._known[1])

    @contextlib.contextmanager
    def weights_go_home(self):
        """Context: `give_back` at the end, also after an exception."""
        outer, self._training = self._training, True
        try:
            yield
        finally:
            self._training = outer
            self.give_back()

    def route_to(self, trainer):
        """Lets a model of several replicas run through the trainer: Keras' own loops are wrong."""
        if self._engine.makes_anew and not self.is_group:
            for name in ("fit", *_ROUTED):
                object.__setattr__(self.host, name, getattr(trainer, name))

    @contextlib.contextmanager
    def routed_to(self, trainer):
        """Context: callbacks that call `self.model.predict` or `evaluate` run through the trainer.

        A model of several replicas is routed anyway.
        """
        names = () if self.is_group or self._engine.makes_anew else _ROUTED
        for name in names:
            object.__setattr__(self.host, name, getattr(trainer, name))
        try:
            yield
        finally:
            for name in names:
                object.__delattr__(self.host, name)


def _checksums(model):
    return [zlib.crc32(variable.numpy().tobytes()) for variable in model.weights]


def _flags(model):
    return [layer.trainable for layer in compat.flatten_layers(model)]


def _belongs_to(model, engine):
    return bool(model.weights) and all(map(engine.owns, model.weights))
