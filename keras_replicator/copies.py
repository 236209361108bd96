"""Objects that were made outside of the trainer's scope, brought inside of it.

A variable that exists before the scope is entered belongs to one device. Models are therefore
rebuilt in the scope from their own config, and take over the state of the original; metrics are
copied with variables of their own. An optimizer that nobody has used yet moves into the scope
itself, so that the user's reference to it stays good. What cannot be brought in is refused with
the fix.
"""

import inspect
import warnings

import keras
import numpy as np

from keras_replicator import compat
from keras_replicator.steps import metrics as step_metrics
from keras_replicator.steps import pinning


def copy_model(model):
    """Returns a copy of a model, made in the current scope, with its weights.

    Args:
        model: A functional, Sequential or subclassed Keras model.

    Raises:
        ValueError: When the model cannot be made from its config.
    """
    try:
        if not model.built:
            _check_config(model)
        with warnings.catch_warnings():
            # Lambdas are handed over as they are; nothing is written down.
            warnings.filterwarnings("ignore", "The object being serialized includes a `lambda`")
            config = model.get_config()
        custom = {type(layer).__name__: type(layer) for layer in compat.flatten_layers(model)}
        _name_custom_parts(config, model, custom)
        with keras.saving.custom_object_scope(custom):
            copy = type(model).from_config(config)
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
    pinning.copy_pins(compat.flatten_layers(model), compat.flatten_layers(copy))
    _copy_assets(model, copy)
    if model.built and model.weights:
        _ensure_built(model, copy)
        copy.set_weights(model.get_weights())
        _copy_seeds(model, copy)
    for layer in compat.flatten_layers(copy):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # what it computes from its weights once
    return copy


def _name_custom_parts(config, owner, custom):
    """Lets a config refer to the functions and classes of a model, registered or not.

    Args:
        config: What `owner.get_config()` returned; changed in place.
        owner: A layer or a model.
        custom: Dict of custom objects by name, which is filled.
    """
    for key, value in config.items():
        part = getattr(owner, key, None)
        if not isinstance(value, dict) or part is None:
            continue
        if inspect.isfunction(part):
            name = f"{key}_{len(custom)}"
            custom[name] = part
            config[key] = {
                "module": "builtins",
                "class_name": "function",
                "config": name,
                "registered_name": name,
            }
            continue
        if "class_name" not in value:
            continue
        custom.setdefault(type(part).__name__, type(part))
        if isinstance(part, keras.Layer) and isinstance(value.get("config"), dict):
            _name_custom_parts(value["config"], part, custom)
    layers = {layer.name: layer for layer in getattr(owner, "layers", ())}
    for entry in config.get("layers", ()) if layers else ():
        inner = entry.get("config") if isinstance(entry, dict) else None
        if isinstance(inner, dict) and inner.get("name") in layers:
            _name_custom_parts(inner, layers[inner["name"]], custom)


def _check_config(model):
    """Raises `ValueError` where Keras forgets what a model without weights was made with."""
    if type(model).get_config is not keras.Model.get_config:
        return
    named = inspect.getfullargspec(type(model).__init__)
    forgotten = sorted({*named.args[1:], *named.kwonlyargs} - {"name", "dtype", "trainable"})
    if forgotten:
        raise ValueError(f"get_config() holds no {', '.join(forgotten)}")


def _ensure_built(model, copy):
    shapes = [[tuple(weight.shape) for weight in each.weights] for each in (model, copy)]
    if shapes[0] == shapes[1]:
        return
    raise ValueError(
        f"The model '{model.name}' of class {type(model).__name__} has {len(shapes[0])} weights, "
        f"its copy from get_config() has {len(shapes[1])} or some of other shapes: it cannot be "
        "built from its config alone. Pass a function without arguments that builds the model: "
        f"ReplicatedTrainer(lambda: {type(model).__name__}(…)). "
        f"Received: weights of the shapes {shapes[0]}, copied to {shapes[1]}"
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


def take_optimizer(optimizer, engine, source=None, target=None):
    """Returns an optimizer that belongs to the current scope.

    Args:
        optimizer: A name, a config dict, or a `keras.optimizers.Optimizer`.
        engine: The engine whose scope it is.
        source: The model that the optimizer may know, or None.
        target: The model that is trained in its place.

    Raises:
        ValueError: When it has been used before and cannot be made from its config.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer = copy_optimizer(optimizer)
        return None if optimizer is None else compat.take_accumulation(optimizer)
    own_accumulation = compat.accumulation_of(optimizer) > 1
    iterations = compat.iterations_of(optimizer)
    owner = compat.strategy_of(iterations)
    is_foreign = owner is not None and owner is not engine.strategy
    if engine.owns(iterations) and not is_foreign and not own_accumulation:
        return optimizer
    if optimizer.built or own_accumulation or is_foreign:
        variables = target.trainable_variables if target is not None and target.built else None
        taken = copy_optimizer(optimizer, variables)
    else:
        compat.move_optimizer_to_scope(optimizer)
        taken = optimizer
    weights = ((), ()) if source is None else (source.weights, target.weights)
    compat.carry_decay_exclusions(optimizer, taken, *weights)
    return compat.take_accumulation(taken)


def copy_optimizer(optimizer, variables=None):
    """Returns an optimizer, made in the current scope, with the state of the original.

    Args:
        optimizer: A name, a config dict, or a `keras.optimizers.Optimizer`.
        variables: Trainable variables of the copied model, to carry slots over.

    Raises:
        ValueError: When it cannot be made from its config.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
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


def copy_metrics(nest, pairs):
    """Returns a nest of metrics in which every metric object is copied.

    A copy has variables of its own, made in the current scope. The models and functions that a
    metric refers to are those of the original.

    Args:
        nest: Dicts, lists and tuples of metrics (or names and functions, which stay).
        pairs: List that is filled with `(original, copy)`.
    """
    if isinstance(nest, dict):
        return {name: copy_metrics(value, pairs) for name, value in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(copy_metrics(value, pairs) for value in nest)
    if not isinstance(nest, keras.metrics.Metric):
        return nest
    for original, copy in pairs:
        if original is nest:
            return copy
    copy = _copy_of(nest, {})
    step_metrics.forget_preparation(copy)
    pairs.append((nest, copy))
    return copy


def _copy_of(value, memo):
    """Copies metrics, their variables and what contains them; everything else is shared."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, keras.Variable):
        copy = memo[id(value)] = compat.variable_like(value)
    elif isinstance(value, keras.metrics.Metric):
        copy = memo[id(value)] = object.__new__(type(value))
        vars(copy).update({name: _copy_of(part, memo) for name, part in vars(value).items()})
    elif compat.is_tracker(value):
        copy = compat.copy_tracker(value, lambda part: _copy_of(part, memo))
    elif isinstance(value, list):
        copy = memo[id(value)] = []
        copy.extend(_copy_of(part, memo) for part in value)
    elif isinstance(value, dict):
        copy = {name: _copy_of(part, memo) for name, part in value.items()}
    elif type(value) in (tuple, set):
        copy = type(value)(_copy_of(part, memo) for part in value)
    else:
        copy = value
    return copy


def give_back_metrics(pairs, engine):
    """Gives metrics that were copied the state of their copies, over all replicas and workers.

    Args:
        pairs: List of `(original, copy)`.
        engine: The engine whose replicas hold the state.
    """
    found = [
        (variable, copy)
        for original, copied in pairs
        if len(original.variables) == len(copied.variables)
        for variable, copy in zip(original.variables, copied.variables)
    ]
    parts = {
        str(number): np.sum([part.numpy() for part in compat.replica_copies(copy)], axis=0)
        for number, (_, copy) in enumerate(found)
        if not compat.reads_first_replica(copy)
    }
    totals = engine.sum_parts(parts)
    for number, (variable, copy) in enumerate(found):
        variable.assign(totals.get(str(number), compat.first_copy(copy)))


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
