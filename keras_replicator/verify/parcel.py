"""Packs a model, its step and its compile arguments for another process.

Functions travel by name where the other process can import them, and by value otherwise
(cloudpickle). Keras objects travel as class and config, so that they are made anew there, in the
scope of the trainer that uses them. The trainer itself, which a step may use
(`trainer.optimizers["critic"]`), becomes a stand-in for the one that runs the step.
"""

import copyreg
import io
import marshal
import pickle
import types

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.verify.report import VerifyError


class TrainerStandIn:
    """Answers in place of the trainer that is being verified."""

    current = None  # the trainer that runs the step

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(TrainerStandIn.current, name)


def pack(thing):
    """Returns the bytes of a nest of functions, Keras objects and arrays.

    Raises:
        VerifyError: When something cannot travel; the message names it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(thing)
    except VerifyError:
        raise
    except Exception as error:
        raise VerifyError(
            "verify runs the model in another process, and its functions cannot be sent there: "
            "the build function, the step and what they refer to must be importable, or picklable "
            "by cloudpickle. Move them to the top level of a module, and create what they use "
            f"(locks, files, sessions) inside of them. The cause: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def unpack(data):
    """Returns what `pack` packed."""
    return pickle.loads(data)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, thing):
        reduced = _reduce(thing)
        return super().reducer_override(thing) if reduced is NotImplemented else reduced


def _reduce(thing):
    from keras_replicator.trainer import ReplicatedTrainer

    if isinstance(thing, type):
        return NotImplemented
    if isinstance(thing, types.CodeType):
        # cloudpickle forgets the file that a function stands in, which a cause is to name.
        return marshal.loads, (marshal.dumps(thing),)
    if isinstance(thing, ReplicatedTrainer):
        return TrainerStandIn, ()
    if isinstance(thing, keras.Model):
        return _model_from_parts, _parts_of(thing)
    if isinstance(thing, keras.layers.Layer):
        _refuse_weights(thing)
        return _from_config, (type(thing), thing.get_config(), {})
    if isinstance(thing, keras.optimizers.Optimizer):
        return _optimizer_from_config, (type(thing), thing.get_config(), _classes_of(thing))
    if isinstance(thing, keras.metrics.MeanMetricWrapper) and type(thing).__module__.startswith(
        "keras."
    ):
        function = compat.is_wrapped_function(thing)
        if type(thing) is keras.metrics.MeanMetricWrapper:
            return _wrapped_metric, (function, thing.name, thing.dtype, _marks(thing))
    if isinstance(thing, keras.metrics.Metric):
        return _from_config, (type(thing), thing.get_config(), _marks(thing))
    if isinstance(thing, keras.random.SeedGenerator):
        return keras.random.SeedGenerator.from_config, (thing.get_config(),)
    if compat.is_saveable(thing):  # losses, policies: plain attributes
        return copyreg.__newobj__, (type(thing),), vars(thing)
    if isinstance(thing, keras.Variable):
        raise VerifyError(_holds("a Keras variable", thing.path))
    if isinstance(thing, tf.Variable):
        raise VerifyError(_holds("a tf.Variable", thing.name))
    if isinstance(thing, tf.RaggedTensor):
        splits = [part.numpy() for part in thing.nested_row_splits]
        return _ragged, (thing.flat_values.numpy(), splits)
    if isinstance(thing, tf.SparseTensor):
        parts = (thing.indices.numpy(), thing.values.numpy(), thing.dense_shape.numpy())
        return tf.SparseTensor, parts
    if isinstance(thing, tf.Tensor):
        return tf.constant, (thing.numpy(), thing.dtype)
    if isinstance(thing, tf.DType):
        return tf.as_dtype, (thing.name,)
    return NotImplemented


def _holds(what, name):
    return (
        f"The build function or the step refers to {what} that was made outside of them "
        f"('{name}'), which cannot be sent to another process. Make it in the build function, as a "
        "weight of the model or of a layer."
    )


def _refuse_weights(layer):
    if layer.weights:
        raise VerifyError(_holds("a layer with weights", layer.name))


def _marks(metric):
    return {name: value for name, value in vars(metric).items() if "keras_replicator" in name}


def _classes_of(optimizer):
    """The classes that a config names: a wrapped optimizer, a schedule."""
    inner = getattr(optimizer, "inner_optimizer", None)
    schedule = compat.schedule_of(inner if inner is not None else optimizer)
    return [type(part) for part in (inner, schedule) if part is not None]


def _scope(classes):
    return keras.saving.custom_object_scope({kind.__name__: kind for kind in classes})


def _from_config(kind, config, attributes):
    made = kind.from_config(config)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _wrapped_metric(function, name, dtype, attributes):
    made = keras.metrics.MeanMetricWrapper(function, name=name, dtype=dtype)
    for attribute, value in attributes.items():
        if not attribute.endswith("_prepared"):
            setattr(made, attribute, value)
    return made


def _optimizer_from_config(kind, config, classes):
    with _scope(classes):
        return kind.from_config(config)


def _ragged(values, splits):
    return tf.RaggedTensor.from_nested_row_splits(values, splits)


def _parts_of(model):
    layers = compat.flatten_layers(model)
    try:
        config = model.get_config()
    except Exception as error:
        raise VerifyError(
            f"The model '{model.name}' of class {type(model).__name__} has no config from which "
            "another process could make it. Pass a function that builds it: "
            f"ReplicatedTrainer(build). Received: model={model!r}. The cause: {error}"
        ) from error
    vocabularies = [
        layer.get_vocabulary(include_special_tokens=False)
        if hasattr(layer, "set_vocabulary")
        else None
        for layer in layers
    ]
    return (
        type(model),
        config,
        model.get_build_config() if model.built else None,
        model.get_weights() if model.built else [],
        list({type(layer) for layer in layers}),
        [layer.trainable for layer in layers],
        vocabularies,
    )


def _model_from_parts(kind, config, build_config, weights, classes, trainable, vocabularies):
    with _scope(classes):
        model = kind.from_config(config)
        if build_config and not model.built:
            model.build_from_config(build_config)
    for layer, flag, words in zip(compat.flatten_layers(model), trainable, vocabularies):
        layer.trainable = flag
        if words and not layer.get_vocabulary(include_special_tokens=False):
            layer.set_vocabulary(words)
    if weights:
        model.set_weights(weights)
    return model


def plain(nest):
    """Returns a nest whose dense tensors are NumPy arrays."""

    def convert(leaf):
        if isinstance(leaf, tf.Tensor):
            return np.array(leaf.numpy())
        return leaf

    return tf.nest.map_structure(convert, nest)
