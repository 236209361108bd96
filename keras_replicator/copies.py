"""Objects that were made outside of the trainer's scope, made anew inside of it.

A variable that exists before the scope is entered belongs to one device. Models, optimizers and
metrics are therefore rebuilt in the scope from their own config, and take over the state of the
original; what has no config is refused with the fix.
"""

import keras

from keras_replicator import compat
from keras_replicator.steps import metrics as step_metrics


def copy_model(model):
    """Returns a copy of a model, made in the current scope, with its weights.

    Args:
        model: A functional, Sequential or subclassed Keras model.

    Raises:
        ValueError: When the model cannot be made from its config.
    """
    custom = {type(layer).__name__: type(layer) for layer in compat.flatten_layers(model)}
    try:
        with keras.saving.custom_object_scope(custom):
            copy = type(model).from_config(model.get_config())
            build_config = model.get_build_config() if model.built else None
            if build_config and not copy.built:
                copy.build_from_config(build_config)
    except Exception as error:
        raise ValueError(
            f"The model '{model.name}' of class {type(model).__name__} cannot be made anew for "
            "several replicas. Pass a function without arguments that builds it: "
            "ReplicatedTrainer(lambda: …), or give the class get_config(). "
            f"Received: model={model!r}. The cause: {error}"
        ) from error
    for original, layer in zip(compat.flatten_layers(model), compat.flatten_layers(copy)):
        layer.trainable = original.trainable
    _copy_assets(model, copy)
    if model.built and model.weights:
        _ensure_built(model, copy)
        copy.set_weights(model.get_weights())
        _copy_seeds(model, copy)
    return copy


def _ensure_built(model, copy):
    if len(copy.weights) == len(model.weights):
        return
    raise ValueError(
        f"The model '{model.name}' of class {type(model).__name__} has {len(model.weights)} "
        f"weights, its copy from get_config() has {len(copy.weights)}: it cannot be built from its "
        "config alone. Pass a function without arguments that builds the model: "
        f"ReplicatedTrainer(lambda: {type(model).__name__}(…))."
    )


def _copy_assets(model, copy):
    """Copies vocabularies and tables, which are neither weights nor (once adapted) config."""
    for original, layer in zip(compat.flatten_layers(model), compat.flatten_layers(copy)):
        if not hasattr(original, "get_vocabulary") or not hasattr(layer, "set_vocabulary"):
            continue
        vocabulary = original.get_vocabulary(include_special_tokens=False)
        if vocabulary and not layer.get_vocabulary(include_special_tokens=False):
            layer.set_vocabulary(vocabulary)


def _copy_seeds(model, copy):
    pairs = zip(compat.seed_states(model), compat.seed_states(copy))
    for original, state in pairs:
        state.assign(original)


def copy_weights(source, target):
    """Copies all weights, seeds included, from one model to one of the same structure."""
    if not target.built or len(target.weights) != len(source.weights):
        compat.build_like(source, target)
    for original, variable in zip(source.weights, target.weights):
        variable.assign(original)
    for original, state in zip(compat.seed_states(source), compat.seed_states(target)):
        state.assign(original)


def copy_optimizer(optimizer, variables=None):
    """Returns an optimizer, made in the current scope, with the state of the original.

    Args:
        optimizer: A name, a config dict, or a `keras.optimizers.Optimizer`.
        variables: Trainable variables of the copied model, to carry slots over.

    Raises:
        ValueError: When it cannot be made from its config.
    """
    if optimizer is None or isinstance(optimizer, (str, dict)):
        return keras.optimizers.get(optimizer)
    custom = {type(optimizer).__name__: type(optimizer)}
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        custom[type(inner).__name__] = type(inner)
    schedule = compat.schedule_of(inner if inner is not None else optimizer)
    if schedule is not None:
        custom[type(schedule).__name__] = type(schedule)
    try:
        with keras.saving.custom_object_scope(custom):
            copy = type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        raise ValueError(
            f"The optimizer '{optimizer.name}' of class {type(optimizer).__name__} cannot be made "
            "anew in the trainer's scope. Give the class get_config(), or pass its name. "
            f"Received: optimizer={optimizer!r}. The cause: {error}"
        ) from error
    state = optimizer.variables
    if variables is not None and len(state) > len(copy.variables):
        copy.build(list(variables))
    if len(state) == len(copy.variables):
        for original, variable in zip(state, copy.variables):
            if tuple(original.shape) == tuple(variable.shape):
                variable.assign(original)
    return copy


def copy_metrics(nest):
    """Returns a nest of metrics in which every metric object is made anew."""
    if isinstance(nest, dict):
        return {name: copy_metrics(value) for name, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(copy_metrics(value) for value in nest)
    if not isinstance(nest, keras.metrics.Metric):
        return nest
    try:
        copy = _metric_from_config(nest)
    except Exception as error:
        raise ValueError(
            f"The metric '{nest.name}' of class {type(nest).__name__} cannot be made anew in the "
            "trainer's scope. Give the class get_config() with its constructor's arguments. "
            f"Received: metrics={nest!r}. The cause: {error}"
        ) from error
    step_metrics.copy_mark(nest, copy)
    return copy


def _metric_from_config(metric):
    function = compat.is_wrapped_function(metric)
    if type(metric) is keras.metrics.MeanMetricWrapper and function is not None:
        return keras.metrics.MeanMetricWrapper(function, name=metric.name, dtype=metric.dtype)
    return type(metric).from_config(metric.get_config())


def refuse_foreign_strategy(model, strategy):
    """Raises `ValueError` when a model was made in the scope of another strategy."""
    for variable in model.weights:
        owner = compat.strategy_of(variable)
        if owner is not None and owner is not strategy:
            raise ValueError(
                f"The model '{model.name}' was made in the scope of another strategy "
                f"({type(owner).__name__}). Pass that strategy, "
                "ReplicatedTrainer(model, strategy=strategy), or build the model outside of every "
                f"scope. Received: the variable '{variable.path}' of {type(owner).__name__}"
            )
