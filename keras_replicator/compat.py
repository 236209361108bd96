"""Every private name of Keras and TensorFlow that the package touches, in one place.

Nothing else in the package may reach into `keras.src` or into underscored attributes of TensorFlow.
`tests/test_compat.py` fails loudly when one of these names moves or changes its signature.

Two kinds of functions live here:

* small readers (`local_copy`, `mark_first_replica_only`, `adapter_for`, …);
* `around(...)`, which lets a module of `steps/` wrap a method of Keras. The wrapper receives the
  original and decides; outside of a replica step every wrapper calls the original unchanged.
"""

import contextlib
import functools
import importlib
import os
import random

import keras
import tensorflow as tf

MINIMUM_TENSORFLOW = (2, 20)
MINIMUM_KERAS = (3, 12)

# What `around` may wrap: readable name -> (module, owner, attribute).
_WRAPPABLE = {
    "variable_assign": ("keras.src.backend.tensorflow.core", "Variable", "_direct_assign"),
    "call_layer": ("keras.src.layers.layer", "Layer", "__call__"),
    "variable_assign_add": ("keras.src.backend.common.variables", "Variable", "assign_add"),
    "variable_assign_sub": ("keras.src.backend.common.variables", "Variable", "assign_sub"),
    "initialize": ("keras.src.backend.tensorflow.core", "Variable", "_initialize"),
    "keras_cond": ("keras.src.backend.tensorflow.core", None, "cond"),
    "next_seed": ("keras.src.random.seed_generator", "SeedGenerator", "next"),
    "scale_loss": ("keras.src.losses.loss", None, "scale_loss_for_distribution"),
    "unscale_loss": ("keras.src.losses.loss", None, "unscale_loss_for_distribution"),
    "build_losses": ("keras.src.trainers.compile_utils", "CompileLoss", "build"),
    "update_mean": ("keras.src.metrics.reduction_metrics", "Mean", "update_state"),
    "embedding_build": ("keras.src.layers.core.embedding", "Embedding", "build"),
    "embedding_call": ("keras.src.layers.core.embedding", "Embedding", "call"),
    "moments": (
        "keras.src.layers.normalization.batch_normalization",
        "BatchNormalization",
        "_moments",
    ),
    "apply": ("keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply"),
    "apply_scaled": (
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer",
        "apply",
    ),
    "add_optimizer_variable": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "add_variable_from_reference",
    ),
    "tf_apply_scaled": (
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer",
        "_tf_apply",
    ),
    "optimizer_add_variable": (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "add_variable",
    ),
    "optimizer_add_like": (
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "add_variable_from_reference",
    ),
    "optimizer_assign": ("keras.src.backend.tensorflow.optimizer", "TFOptimizer", "assign"),
    "optimizer_assign_add": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "assign_add",
    ),
    "optimizer_assign_sub": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "assign_sub",
    ),
    "update_step": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "_backend_update_step",
    ),
    "weight_decay": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "_apply_weight_decay",
    ),
    "overwrite_with_average": (
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "_overwrite_model_variables_with_average_value",
    ),
}


def wrappable_names():
    """Returns the names that `around` accepts."""
    return sorted(_WRAPPABLE)


def lookup(name):
    """Returns `(owner, attribute)` for a wrappable name, importing what is needed."""
    module_name, owner_name, attribute = _WRAPPABLE[name]
    module = importlib.import_module(module_name)
    owner = module if owner_name is None else getattr(module, owner_name)
    return owner, attribute


def around(name):
    """Decorator: wraps a private function of Keras.

    Args:
        name: One of `wrappable_names()`.

    The decorated function is called as `wrapper(original, *args, **kwargs)`.
    """
    owner, attribute = lookup(name)
    original = getattr(owner, attribute)

    def install(wrapper):
        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(owner, attribute, wrapped)
        return wrapper

    return install


# ---------------------------------------------------------------------------------- versions


def check_versions():
    """Raises `ImportError` unless TensorFlow, Keras and the backend are supported."""
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "keras_replicator needs Keras' TensorFlow backend. Set the environment variable "
            "KERAS_BACKEND=tensorflow before Keras is imported. "
            f"Received: keras.backend.backend()={keras.backend.backend()!r}"
        )
    for name, module, minimum in (
        ("tensorflow", tf, MINIMUM_TENSORFLOW),
        ("keras", keras, MINIMUM_KERAS),
    ):
        if _version(module.__version__) < minimum:
            wanted = ".".join(map(str, minimum))
            raise ImportError(
                f"keras_replicator needs {name} >= {wanted}. Upgrade it with "
                f"`pip install --upgrade '{name}>={wanted}'`. "
                f"Received: {name}=={module.__version__}"
            )


def _version(text):
    return tuple(int(part) for part in text.split(".")[:2])


# -------------------------------------------------------------------------- replica variables


def raw_variable(variable):
    """Returns the `tf.Variable` behind a Keras variable, without autocasting."""
    if isinstance(variable, keras.Variable):
        return variable._value
    return variable


def local_copy(variable):
    """Returns the copy of a distributed variable that belongs to the current replica.

    Args:
        variable: A `keras.Variable`, a `tf.Variable` or a distributed variable.

    Returns:
        A plain `tf.Variable`; the variable itself where nothing is distributed.
    """
    variable = raw_variable(variable)
    on_device = getattr(variable, "_get_on_device_or_primary", None)
    return variable if on_device is None else on_device()


def is_distributed(variable):
    """Whether a variable has one copy per replica."""
    return isinstance(raw_variable(variable), tf.distribute.DistributedValues)


def strategy_of(variable):
    """Returns the strategy in whose scope a variable was made, or None."""
    value = raw_variable(variable)
    return value._distribute_strategy if is_distributed(value) else None


def move_to_scope(variable):
    """Makes the value of a Keras variable anew where the current scope puts it."""
    if variable._value is not None:
        variable._initialize(variable._value.numpy())


def variable_like(variable):
    """Returns a new Keras variable with the value and the settings of another one."""
    return keras.Variable(
        variable.numpy(),
        dtype=variable.dtype,
        trainable=variable.trainable,
        name=variable.name,
        aggregation=variable.aggregation,
        synchronization=variable.synchronization,
    )


def is_tracker(value):
    """Whether an attribute is what Keras tracks the variables of an object with."""
    from keras.src.utils.tracking import Tracker

    return isinstance(value, Tracker)


def copy_tracker(tracker, copied):
    """Returns a tracker of copies.

    Args:
        tracker: The tracker of an object.
        copied: Function that returns the copy of one of its lists.
    """
    from keras.src.utils.tracking import Tracker

    stores = {name: (test, copied(store)) for name, (test, store) in tracker.config.items()}
    copy = Tracker(stores, exclusions=tracker.exclusions)
    for name, (_, store) in stores.items():
        copy.stored_ids[name].update(map(id, store))
    return copy


def scope_has_copies():
    """Whether variables that are made here get a copy on each replica."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.TPUStrategy,
    )
    return isinstance(tf.distribute.get_strategy(), kinds)


def mark_first_replica_only(variable):
    """Makes readers outside of a step see the first replica's copy instead of the sum."""
    raw_variable(variable)._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def is_summed_on_read(variable):
    """Whether each replica holds a part of a variable's value (the state of a metric)."""
    value = raw_variable(variable)
    return (
        getattr(variable, "synchronization", None) == "on_read"
        and getattr(value, "_aggregation", None) == tf.VariableAggregation.SUM
    )


def static_replica_id(replica_context):
    """Returns the replica's global number: an int where it is known while tracing."""
    replica_id = replica_context.replica_id_in_sync_group
    static = tf.get_static_value(replica_id)
    return replica_id if static is None else int(static)


def set_random_seed(seed):
    """`keras.utils.set_random_seed`, which before Keras 3.13 kept the global seed generator."""
    from keras.src.backend.common import global_state

    keras.utils.set_random_seed(seed)
    global_state.set_global_attribute("global_seed_generator", None)


def ensure_global_seed_generator():
    """Creates Keras' global seed generator outside of every strategy."""
    from keras.src.random import seed_generator

    with tf.init_scope():
        seed_generator.global_seed_generator()


# ------------------------------------------------------------------------------ losses, masks


def get_mask(tensor):
    """Returns the Keras mask that travels with a tensor, or None."""
    from keras.src import backend

    return backend.get_keras_mask(tensor)


def set_mask(tensor, mask):
    """Lets a Keras mask travel with a tensor."""
    tensor._keras_mask = mask


def same_rank(first, second):
    """Squeezes or expands two tensors to the same rank as Keras' losses do."""
    from keras.src.losses.loss import squeeze_or_expand_to_same_rank

    return squeeze_or_expand_to_same_rank(first, second)


def base_loss_call():
    """Returns `keras.losses.Loss.__call__`, to see whether a subclass overrides it."""
    return keras.losses.Loss.__call__


def user_loss(compile_loss):
    """Returns the `loss` of `compile` as the user gave it."""
    return compile_loss._user_loss


def flat_losses(compile_loss):
    """Returns the list of (path, loss, weight, name) tuples of a built compile loss."""
    return compile_loss._flat_losses


def replace_flat_losses(compile_loss, wrap):
    """Replaces each resolved loss function of a built compile loss by `wrap(loss)`."""
    compile_loss._flat_losses = [
        entry._replace(loss=wrap(entry.loss)) for entry in compile_loss._flat_losses
    ]


def is_wrapped_function(loss):
    """Returns the function behind a loss or metric that merely wraps one, else None."""
    return getattr(loss, "_fn", None) or getattr(loss, "fn", None)


def around_activity_regularizers(wrapper):
    """Decorator: wraps activity regularizers where Keras adds their sum over rows to the loss.

    Keras 3.14 and later divide it by the rows of the batch, a mean over rows: nothing to do there.

    Args:
        wrapper: Takes a regularizer that a layer is about to use, returns what it uses instead.
    """
    if _version(keras.__version__) >= (3, 14):
        return wrapper

    def read(layer):
        regularizer = vars(layer).get("activity_regularizer")
        return None if regularizer is None else wrapper(regularizer)

    def write(layer, regularizer):
        vars(layer)["activity_regularizer"] = regularizer

    keras.Layer.activity_regularizer = property(read, write)
    return wrapper


# ---------------------------------------------------------------------------- models, metrics


def loss_tracker(model):
    """Returns the `Mean` metric in which Keras collects the total loss, or None."""
    return getattr(model, "_loss_tracker", None)


def loss_trackers(model):
    """Returns the metrics in which Keras collects the total loss and that of each output."""
    trackers = [] if loss_tracker(model) is None else [loss_tracker(model)]
    return trackers + (list(compile_loss(model).metrics) if compile_loss(model) else [])


def compile_loss(model):
    """Returns the compiled loss container of a model, or None."""
    return getattr(model, "_compile_loss", None)


def compile_metrics(model):
    """Returns the compiled metrics container of a model, or None."""
    return getattr(model, "_compile_metrics", None)


def compute_loss(model, x, y, y_pred, sample_weight, training):
    """Calls the model's `compute_loss`, also one without the argument `training`."""
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def call_model(model, x, training):
    """Calls a model, passing `training` only where its call takes it."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def leaf_metrics(model):
    """Returns every metric that holds state of its own below a model, without duplicates.

    Includes compiled metrics, loss trackers and metrics that are attributes of layers.
    """
    found, stack = {}, []
    for container in (loss_tracker(model), compile_metrics(model)):
        if container is not None:
            stack.append(container)
    if compile_loss(model) is not None:
        stack.extend(compile_loss(model).metrics)
    for layer in model._flatten_layers():
        stack.extend(layer._metrics)
        if isinstance(layer, keras.Model) and layer is not model:
            tracker = loss_tracker(layer)
            stack.extend([tracker] if tracker is not None else [])
    while stack:
        metric = stack.pop()
        if id(metric) in found:
            continue
        children = list(getattr(metric, "_metrics", [])) + list(_compiled_children(metric))
        if not isinstance(metric, _compile_metrics_class()):
            found[id(metric)] = metric
        stack.extend(children)
    return list(found.values())


def _compile_metrics_class():
    from keras.src.trainers.compile_utils import CompileMetrics

    return CompileMetrics


def _compiled_children(metric):
    if isinstance(metric, _compile_metrics_class()) and metric.built:
        return metric.metrics
    return []


def metric_results(model):
    """Returns `{name: value}` of the model's metrics as Keras logs them."""
    return model.get_metrics_result()


def compile_config(model):
    """Returns the arguments of the model's last `compile`, or None."""
    config = getattr(model, "_compile_config", None)
    return None if config is None else dict(config.config)


def flatten_layers(model):
    """Returns every layer of a model, nested ones and itself included."""
    return list(model._flatten_layers())


def sublayers(layer):
    """Returns the layers directly below a layer or model, in their order."""
    return list(layer._layers)


def symbolic_build(model, data_batch):
    """Builds model, losses and metrics from shapes and dtypes without reading data."""
    model._symbolic_build(data_batch=data_batch)


def flatten_metrics_in_order(model, logs):
    """Returns logs as Keras' evaluate and train_on_batch do: a list, or one number."""
    return model._flatten_metrics_in_order(logs)


def should_eval(model, epoch, validation_freq):
    """Whether `validation_freq` asks for a validation after this epoch."""
    return model._should_eval(epoch, validation_freq)


def take_initial_epoch(model):
    """Returns the epoch that BackupAndRestore restored, or 0."""
    return getattr(model, "_initial_epoch", None) or 0


def reset_initial_epoch(model):
    """Forgets an epoch that a callback of an earlier fit restored."""
    if getattr(model, "_initial_epoch", None):
        model._initial_epoch = None


def overridden(model, method):
    """Whether a model's class overrides a method of `keras.Model`."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


# ------------------------------------------------------------------------------- data sources


def adapter_for(x, y=None, sample_weight=None, *, batch_size, steps, shuffle, class_weight):
    """Returns Keras' data adapter for anything that `fit` takes."""
    from keras.src.trainers.data_adapters import get_data_adapter

    return get_data_adapter(
        x,
        y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps,
        shuffle=shuffle,
        class_weight=class_weight,
    )


def take_signature(adapter, other):
    """Gives an adapter the types and shapes of batches that another one has found."""
    adapter._output_signature = other._output_signature


def is_array_adapter(adapter):
    """Whether an adapter holds arrays that can be read by index."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(adapter, ArrayDataAdapter)


def is_generator_adapter(adapter):
    """Whether an adapter reads a Python generator, which gives its batches once."""
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter

    return isinstance(adapter, GeneratorDataAdapter)


def array_adapter_inputs(adapter):
    """Returns the `(x, y, sample_weight)` nest that an array adapter holds."""
    return adapter._inputs


def to_sliceable(inputs):
    """Returns a nest of Keras' sliceables for TensorFlow."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.convert_to_sliceable(inputs, target_backend="tensorflow")


def train_validation_split(arrays, validation_split):
    """Splits arrays as `fit(validation_split=…)` does."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=validation_split)


def unpack(data):
    """Returns `(x, y, sample_weight)` of a batch."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.unpack_x_y_sample_weight(data)


def class_weights_to_sample_weights(y, class_weight):
    """Returns one weight per row, taken from the row's class."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def class_weight_map(class_weight):
    """Returns a `tf.data` map function that turns class weights into sample weights."""
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

    return make_class_weight_map_fn(class_weight)


def shards_by_file(dataset):
    """Whether the options of a data set ask for whole files for each worker."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return policy == tf.data.experimental.AutoShardPolicy.FILE


def shard_by_file(dataset, workers, worker):
    """Returns the part of a data set that reads a worker's files only.

    Reading it is an error of TensorFlow where there are fewer files than workers.
    """
    from tensorflow.python.data.experimental.ops import distribute

    return distribute._AutoShardDataset(dataset, workers, worker)


def local_dataset(distributed):
    """Returns this worker's data set behind a distributed one, or None (for an iterator)."""
    for name in ("_cloned_datasets", "_datasets"):
        if datasets := getattr(distributed, name, None):
            return datasets[0]
    return None


def pythonify(logs):
    """Returns logs with Python numbers instead of tensors."""
    from keras.src.utils.python_utils import pythonify_logs

    return pythonify_logs(logs)


def callback_list(callbacks, **kwargs):
    """Returns Keras' `CallbackList`, an existing one unchanged."""
    from keras.src.callbacks.callback_list import CallbackList

    if isinstance(callbacks, CallbackList):
        return callbacks
    return CallbackList(callbacks, **kwargs)


def as_callbacks(callbacks):
    """Returns the callbacks of what `fit` takes as `callbacks`, as a list."""
    if callbacks is None:
        return []
    if hasattr(callbacks, "callbacks"):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def callbacks_of(callback_list):
    """Returns the callbacks of a `CallbackList`."""
    return list(callback_list.callbacks)


def tensorflow_started():
    """Whether TensorFlow has initialised its devices, so that they cannot change any more."""
    from tensorflow.python.eager import context

    return context.context()._context_handle is not None


def is_saveable(thing):
    """Whether an object pickles itself by Keras' own file format, which loses what it wraps."""
    from keras.src.saving.keras_saveable import KerasSaveable

    return isinstance(thing, KerasSaveable)


def add_op_callback(function):
    """Lets `function(kind, inputs, attrs, outputs, …)` see every operation that runs eagerly."""
    from tensorflow.python.framework import op_callbacks

    op_callbacks.add_op_callback(function)


def remove_op_callback(function):
    """Ends what `add_op_callback` began."""
    from tensorflow.python.framework import op_callbacks

    op_callbacks.remove_op_callback(function)


# The kernels behind tf.random, keras.random and dropout that draw without a gradient.
RANDOM_OPERATIONS = {
    "tensorflow.python.ops.gen_random_ops": (
        "multinomial",
        "random_poisson_v2",
        "random_shuffle",
        "random_standard_normal",
        "random_uniform",
        "random_uniform_int",
        "truncated_normal",
    ),
    "tensorflow.python.ops.gen_stateless_random_ops": (
        "stateless_multinomial",
        "stateless_random_binomial",
        "stateless_random_poisson",
    ),
    "tensorflow.python.ops.gen_stateless_random_ops_v2": (
        "stateless_random_normal_v2",
        "stateless_random_uniform_full_int_v2",
        "stateless_random_uniform_int_v2",
        "stateless_random_uniform_v2",
        "stateless_truncated_normal_v2",
    ),
    "tensorflow.python.ops.gen_stateful_random_ops": (
        "stateful_standard_normal_v2",
        "stateful_truncated_normal",
        "stateful_uniform",
        "stateful_uniform_full_int",
        "stateful_uniform_int",
    ),
}


def random_operations():
    """Returns `(module, name)` of every function in `RANDOM_OPERATIONS`."""
    return [
        (importlib.import_module(module), name)
        for module, names in RANDOM_OPERATIONS.items()
        for name in names
    ]


def device_memory_limits():
    """Returns `{name: bytes}` that TensorFlow may use on each accelerator."""
    from tensorflow.python.client import device_lib

    return {
        device.name.removeprefix("/device:"): device.memory_limit
        for device in device_lib.list_local_devices()
        if device.device_type != "CPU"
    }


# ---------------------------------------------------------------------------------- optimizers


def inner_optimizers(optimizer):
    """Returns an optimizer and those that it wraps (loss scale, one per group of variables)."""
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", ())]
    return [optimizer] + [
        each for one in inner if one is not None for each in inner_optimizers(one)
    ]


def iterations_of(optimizer):
    """Returns the variable that counts an optimizer's calls."""
    return optimizer._iterations


def move_optimizer_to_scope(optimizer):
    """Lets an optimizer that is not built yet belong to the current strategy."""
    for variable in optimizer.variables:
        move_to_scope(variable)
    for each in inner_optimizers(optimizer):
        each._distribution_strategy = tf.distribute.get_strategy()


_ACCUMULATION = "_keras_replicator_accumulation"


def accumulation_of(optimizer):
    """Returns the `gradient_accumulation_steps` that an optimizer was made with, or 1."""
    inner = inner_optimizers(optimizer)[-1]
    return inner.gradient_accumulation_steps or 1


def take_accumulation(optimizer):
    """Lets the trainer accumulate in an optimizer's place, and returns the optimizer.

    Keras' own accumulation averages batches, not rows, and cannot be reduced under a condition.
    """
    inner, steps = inner_optimizers(optimizer)[-1], accumulation_of(optimizer)
    if steps > 1:
        setattr(inner, _ACCUMULATION, steps)
        inner.gradient_accumulation_steps = None
    return optimizer


def taken_accumulation(optimizer):
    """Returns the steps that `take_accumulation` has taken over, or 1."""
    return getattr(inner_optimizers(optimizer)[-1], _ACCUMULATION, 1)


def carry_decay_exclusions(source, target, originals, copies):
    """Lets an optimizer exclude from weight decay what another one excludes.

    Args:
        source: The optimizer that was told by `exclude_from_weight_decay`.
        target: The optimizer that takes it over; may be the same one.
        originals: Variables that `source` may know.
        copies: The variables of `target` that stand for them.
    """
    for old, new in zip(inner_optimizers(source), inner_optimizers(target)):
        keys = set(getattr(old, "_exclude_from_weight_decay", ()))
        keys.update(
            new._var_key(copy)
            for original, copy in zip(originals, copies)
            if old._var_key(original) in keys
        )
        if keys:
            new._exclude_from_weight_decay = keys
        pattern = getattr(old, "_exclude_from_weight_decay_pattern", None)
        if pattern is not None:
            new._exclude_from_weight_decay_pattern = pattern


def known_variables(optimizer):
    """Returns the trainable variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def decays(optimizer, variable):
    """Whether weight decay applies to a variable."""
    return optimizer.weight_decay is not None and optimizer._use_weight_decay(variable)


def moving_averages(optimizer):
    """Returns the exponential moving averages of an optimizer with `use_ema=True`."""
    return optimizer._model_variables_moving_average


def apply_with_finite_check(optimizer, grads, trainable_variables):
    """`LossScaleOptimizer.apply` without its detour through cross-replica context."""
    return optimizer._common_apply(grads, trainable_variables)


def schedule_of(optimizer):
    """Returns the learning-rate schedule of an optimizer, or None."""
    rate = getattr(optimizer, "_learning_rate", None)
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def seed_states(model):
    """Returns the state variables of all seed generators below a model, in order."""
    states = []
    for layer in flatten_layers(model):
        states.extend(generator.state for generator in getattr(layer, "_seed_generators", []))
    return states


def build_like(source, target):
    """Builds a model from the recorded build shapes of another one of its class."""
    config = source.get_build_config()
    if config:
        target.build_from_config(config)


def use_local_reductions(strategy):
    """Lets a MirroredStrategy over CPUs reduce in memory.

    Its default collectives collide with those of any other strategy of the process.
    """
    extended = strategy.extended
    if not isinstance(strategy, tf.distribute.MirroredStrategy) or isinstance(
        strategy, tf.distribute.MultiWorkerMirroredStrategy
    ):
        return
    if all("CPU" in device for device in extended.worker_devices):
        extended._cross_device_ops = tf.distribute.ReductionToOneDevice()


def replica_copies(variable):
    """Returns the copies of a variable on this worker's replicas."""
    value = raw_variable(variable)
    return list(value.values) if is_distributed(value) else [value]


def compiled(function, **options):
    """`tf.function` without AutoGraph, and without warnings that count traces over trainers."""
    result = tf.function(function, autograph=False, **options)
    result._omit_frequent_tracing_warning = True
    return result


def _let_distributed_variables_be_numbers():
    """Gives distributed variables `int()` and `float()`, which plain variables have."""
    from tensorflow.python.distribute.values import DistributedVariable

    for name, convert in (("__int__", int), ("__float__", float), ("__index__", int)):
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, lambda self, convert=convert: convert(self.numpy()))


_let_distributed_variables_be_numbers()


# ------------------------------------------------------------------------------ several workers

# The methods of keras.callbacks.BackupAndRestore that write or delete files.
BACKUP_WRITERS = ("_save_model", "on_train_end")


def multi_worker_strategy(num_cpus, peer_timeout, start_timeout, jobs, leader):
    """Returns a `MultiWorkerMirroredStrategy` that uses several logical CPUs per worker.

    Args:
        num_cpus: Logical CPUs of this worker, which count where there is no GPU.
        peer_timeout: Seconds of silence until a worker counts as lost. TensorFlow's own service
            gets twice that: it is the `Watch` that notices first, and knows whom.
        start_timeout: Seconds that a worker waits for the others at the start.
        jobs: Dict of the number of tasks per role ("chief", "worker").
        leader: Name of the task that leads, such as "/job:worker/replica:0/task:0".
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.distribute import collective_all_reduce_strategy as module
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=name, num_tasks=count)
            for name, count in jobs.items()
        ],
        cluster_register_timeout_in_ms=int(start_timeout * 1000),
        heartbeat_timeout_in_ms=int(peer_timeout * 2000),
    )
    extended = module.CollectiveAllReduceExtended
    original = extended._initialize_local_devices

    def with_all_cpus(self, cluster_resolver, worker_device):
        devices, kind = original(self, cluster_resolver, worker_device)
        if kind == "CPU":
            devices = tuple(f"{worker_device}/device:CPU:{i}" for i in range(num_cpus))
        return devices, kind

    extended._initialize_local_devices = with_all_cpus
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=tf.distribute.experimental.CommunicationOptions(
                bytes_per_pack=0,
                implementation=tf.distribute.experimental.CommunicationImplementation.AUTO,
            )
        )
    finally:
        extended._initialize_local_devices = original


def join_mesh(worker, addresses, kind, peer_timeout, start_timeout):
    """Connects this process with the others over which a DTensor mesh lies.

    Args:
        worker: Number of this worker.
        addresses: "host:port" of every worker, in order.
        kind: "CPU" or "GPU".
        peer_timeout: Seconds of silence until a worker counts as lost, as for
            `multi_worker_strategy`.
        start_timeout: Seconds that a worker waits for the others at the start.

    Returns:
        TensorFlow's names of the tasks, by worker number.
    """
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.eager import context

    names = {n: f"/job:worker/replica:0/task:{n}" for n in range(len(addresses))}
    os.environ.update(
        DTENSOR_CLIENT_ID=str(worker),
        DTENSOR_NUM_CLIENTS=str(len(addresses)),
        DTENSOR_JOB_NAME="worker",
        DTENSOR_JOBS=",".join(addresses),
    )
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=names[0],
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=len(addresses))
        ],
        cluster_register_timeout_in_ms=int(start_timeout * 1000),
        heartbeat_timeout_in_ms=int(peer_timeout * 2000),
    )
    tf.experimental.dtensor.initialize_accelerator_system(kind, enable_coordination_service=False)
    return names


# Our own group of collectives, apart from those that tf.distribute numbers.
_GROUP_KEY = 0x6B72
_HASH_RANGE = 2**31 - 1
# Kinds of collectives.
_SUM, _SIZES, _ROWS = range(3)


def instance_key(tag, kind, tensor):
    """A number for one collective on tensors of one type and shape.

    TensorFlow remembers what a collective is, its type and its shape by its number for as long as
    the process lives, and refuses another one under that number: the shorter batch at the end of
    an epoch, or what a trainer with another model sends at the same place.
    """
    key = ((tag << 2 | kind) << 8 | tensor.dtype.as_datatype_enum) % _HASH_RANGE
    for size in tf.unstack(tf.shape(tensor, tf.int64)):
        key = (key * 1_000_003 + size + 1) % _HASH_RANGE
    return tf.cast(key, tf.int32)


_tokens = {}


def _ordering_token(device):
    """A resource of one device: collectives that take it run in the order of the program.

    Without it, those of two devices of one process wait for each other.
    """
    from tensorflow.python.ops import resource_variable_ops

    if device not in _tokens:
        with tf.init_scope(), tf.device(device):
            _tokens[device] = resource_variable_ops.ResourceVariable(0.0)
    return [_tokens[device].handle]


def sum_any_shape(tensor, num_replicas, tag):
    """Adds up a tensor over the replicas of all workers; its shape may differ between steps."""
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=num_replicas,
        group_key=_GROUP_KEY,
        instance_key=instance_key(tag, _SUM, tensor),
        ordering_token=_ordering_token(tensor.device),
        merge_op="Add",
        final_op="Id",
        communication_hint="auto",
    )


def sum_over_tasks(tensor, num_workers):
    """Adds up a tensor over workers, on the CPU of each; not for use in a replica."""
    with tf.device("CPU:0"):
        tensor = tf.identity(tensor)
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=num_workers,
            group_key=_GROUP_KEY + 1,
            instance_key=instance_key(0, _SUM, tensor),
            ordering_token=_ordering_token("CPU:0"),
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
        )


def gather_any_size(tensor, num_replicas, index, tag):
    """Concatenates rows over the replicas of all workers, in the order of replicas.

    Args:
        tensor: Tensor of rank >= 1 whose first dimension may differ between replicas and steps.
        num_replicas: Replicas of the job.
        index: Number of this replica.
        tag: A number for this call, the same on all replicas.
    """

    def gather(value, kind):
        return tf.raw_ops.CollectiveGatherV2(
            input=value,
            group_size=num_replicas,
            group_key=_GROUP_KEY,
            instance_key=instance_key(tag, kind, value),
            ordering_token=_ordering_token(tensor.device),
            communication_hint="auto",
        )

    rows = tf.shape(tensor)[0]
    facts = gather(tf.stack([[tf.cast(index, tf.int32), rows]]), _SIZES)
    largest = tf.reduce_max(facts[:, 1])
    padding = tf.zeros(tf.concat([[largest - rows], tf.shape(tensor)[1:]], 0), tensor.dtype)
    padded = tf.concat([tensor, padding], 0)
    everything = gather(padded, _ROWS)
    order = tf.argsort(facts[:, 0])
    parts = [
        everything[order[number] * largest : order[number] * largest + facts[order[number], 1]]
        for number in range(num_replicas)
    ]
    joined = tf.concat(parts, 0)
    return tf.ensure_shape(joined, tf.TensorShape([None]).concatenate(tensor.shape[1:]))


@contextlib.contextmanager
def local_initial_values(strategy):
    """Context: each worker gives new variables its own initial values.

    Otherwise each variable is a broadcast, in which a worker that makes other variables hangs.
    """
    extended = strategy.extended
    original = extended._get_variable_creator_initial_value

    def initial_value(replica_id, device, primary_var, **kwargs):
        if replica_id > 0:
            return original(replica_id, device, primary_var, **kwargs)

        def compute():
            with tf.device(device):
                value = kwargs["initial_value"]
                value = value() if callable(value) else value
                return tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))

        return compute

    extended._get_variable_creator_initial_value = initial_value
    try:
        yield
    finally:
        del extended._get_variable_creator_initial_value


def global_seed():
    """Returns the seed of `tf.random.set_seed`, or None."""
    from tensorflow.python.eager import context

    return context.global_seed()


def peer_answers(task, timeout):
    """Asks TensorFlow's server in another process whether it is there.

    Args:
        task: Name of the task, such as "/job:worker/replica:0/task:1".
        timeout: Seconds to wait.

    Returns:
        True, False when nobody is there (or another process than before), None without an answer.
    """
    from tensorflow.python.eager import context

    try:
        context.context().check_collective_ops_peer_health(task, int(timeout * 1000))
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError):
        return False
    except tf.errors.OpError:
        return None
    return True


def abort_collectives(message):
    """Makes every collective of this process fail, those that are waiting, too."""
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def set_shared_value(key, value):
    """Stores a string that every worker of the job can read."""
    from tensorflow.python.eager import context

    context.context().set_config_key_value(key, value)


def get_shared_value(key, timeout):
    """Waits up to `timeout` seconds for a string that a worker has stored."""
    from tensorflow.python.eager import context

    return context.context().get_config_key_value(key, timeout_in_ms=int(timeout * 1000))


# --------------------------------------------------------------------------------- checkpoints


def global_seed_state():
    """Returns the state variable of Keras' global seed generator."""
    from keras.src.random import seed_generator

    return seed_generator.global_seed_generator().state


def first_copy(variable):
    """Returns the value of a variable's first copy on this worker."""
    return replica_copies(variable)[0].numpy()


def reads_first_replica(variable):
    """Whether readers see the first replica's copy rather than the sum over replicas."""
    return getattr(raw_variable(variable), "_aggregation", None) != tf.VariableAggregation.SUM


def plain_numbers(history):
    """Returns a history with Python floats, which JSON takes."""
    return {name: [float(value) for value in values] for name, values in history.items()}


# Attributes of callbacks that are no state of theirs: what Keras hands them, open machinery, and
# `min_delta`, whose sign Keras turns in each process once it knows the direction of the monitor.
CALLBACK_MACHINERY = frozenset(
    (
        "model",
        "_model",
        "params",
        "validation_data",
        "append",
        "min_delta",
        "_is_tracing",
        "_profiler_started",
    )
)


def pipeline_parts(dataset):
    """Returns `(kind, shuffles in front of it, has a seed)` of each part of a pipeline.

    Args:
        dataset: A `tf.data.Dataset`. Data sets that its functions make are not looked into.
    """
    parts, stack = [], [(dataset, 0)]
    while stack:
        node, depth = stack.pop()
        kind = type(node).__name__
        seeds = (getattr(node, "_seed", 0), getattr(node, "_seed2", 0))
        has_seed = "Shuffle" in kind and any(int(seed) for seed in seeds)
        parts.append((kind, depth, has_seed))
        stack.extend((parent, depth + ("Shuffle" in kind)) for parent in node._inputs())
    return parts


def save_iterator(iterator):
    """Returns the place of a `tf.data` iterator as a variant tensor.

    Raises:
        tf.errors.OpError: When its pipeline holds something that TensorFlow cannot save.
    """
    fail_on_external_state = 2  # tf.data.experimental.ExternalStatePolicy.FAIL
    return tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource,
        external_state_policy=fail_on_external_state,
    )


def restore_iterator(iterator, place):
    """Sets a `tf.data` iterator to a place that `save_iterator` returned.

    Raises:
        tf.errors.OpError: When its pipeline is another one.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=place)


def profiles_batches(tensorboard):
    """Whether a `keras.callbacks.TensorBoard` profiles some batches."""
    return bool(tensorboard._should_trace)


def train_writer(tensorboard):
    """Returns the summary writer with which `keras.callbacks.TensorBoard` logs training."""
    return tensorboard._train_writer


# ---------------------------------------------------------------------------------------- mesh


class Deferred:
    """Keras variables that were described, but not allocated.

    Attributes:
        scope: Keras' scope in which they were made.
        variables: The variables, in the order in which they were made.
    """

    def __init__(self, scope):
        self.scope = scope
        self.variables = []

    def initialize(self):
        """Gives every variable its value, or what was assigned to it meanwhile."""
        for variable in self.variables:
            if variable._value is None:
                variable._deferred_initialize()
            assigned = self.scope.get_current_value(variable)
            if assigned is not None:
                variable.assign(assigned)


@contextlib.contextmanager
def deferred_variables():
    """Context: new Keras variables have shapes, but no values; yields a `Deferred`."""
    from keras.src.backend.common import global_state

    name = "uninitialized_variables"
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, [])
    scope = keras.StatelessScope(initialize_variables=False)
    deferred = Deferred(scope)
    try:
        with scope:
            yield deferred
        deferred.variables = global_state.get_global_attribute(name)
    finally:
        global_state.set_global_attribute(name, before)


@contextlib.contextmanager
def kept_names(only_on_error=False):
    """Context: what is built in it leaves no trace in names and seeds of what is built later.

    Args:
        only_on_error: Whether that holds only where it ends by an exception.
    """
    from keras.src.backend.common import global_state

    name = "object_name_uids"
    counters = dict(global_state.get_global_attribute(name) or {})
    seeds = random.getstate()
    keep = True
    try:
        yield
        keep = not only_on_error
    finally:
        found = global_state.get_global_attribute(name)
        if keep:
            random.setstate(seeds)
        if keep and found is not None:
            found.clear()
            found.update(counters)


def set_raw_variable(variable, value):
    """Sets the `tf.Variable` behind a Keras variable."""
    variable._value = value


def unallocated_variable(variable):
    """Returns what stands for the `tf.Variable` behind a Keras variable, and takes no memory."""
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    return UninitializedVariable(
        shape=variable.shape, dtype=tf.as_dtype(variable.dtype), name=variable.name
    )


# ------------------------------------------------------------------------------ logical devices


def initialize(variable, value):
    """Makes the `tf.Variable` behind a Keras variable in the current scope."""
    variable._initialize(value)


@contextlib.contextmanager
def mirrored_on(strategy, devices):
    """Context: a MirroredStrategy makes the copies of new variables on these devices.

    Args:
        strategy: The strategy.
        devices: One name for each replica, such as "CPU:2".
    """
    extended = strategy.extended
    before = extended._devices
    host = before[0].rpartition("/")[0]
    extended._devices = tuple(f"{host}/device:{name}" for name in devices)
    try:
        yield
    finally:
        extended._devices = before


def short_devices_of(variable):
    """Returns the names, such as "CPU:2", of the devices of a variable's copies."""
    return [copy.device.rpartition("device:")[2] for copy in replica_copies(variable)]


def place_gradients(where):
    """Runs the gradient of each operation in the context that `where(its name scope)` returns."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import backprop

    original = backprop._gradient_function

    def placed(op_name, attributes, count, inputs, outputs, gradients, skipped, forward_name_scope):
        with where(forward_name_scope):
            return original(
                op_name, attributes, count, inputs, outputs, gradients, skipped, forward_name_scope
            )

    pywrap_tfe.TFE_Py_RegisterGradientFunction(placed)


# --------------------------------------------------------------------------- parameter servers


def on_parameter_server(variable):
    """Whether a variable was made in the scope of a `ParameterServerStrategy`."""
    from tensorflow.python.distribute import ps_values

    return isinstance(raw_variable(variable), ps_values.CachingVariable)


@contextlib.contextmanager
def stand_ins(variables, values):
    """Context: Keras variables that are read and assigned are others, which take their place.

    Args:
        variables: Keras variables.
        values: A `tf.Variable` for each.
    """
    before = [variable._value for variable in variables]
    for variable, value in zip(variables, values):
        variable._value = value
    try:
        yield
    finally:
        for variable, value in zip(variables, before):
            variable._value = value


def local_variable(name, shape, dtype):
    """Returns a variable that lives on the worker which runs the function that is traced.

    Args:
        name: Its name on that worker.
        shape: Its shape.
        dtype: Its dtype.
    """
    from tensorflow.python.ops import resource_variable_ops

    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.as_dtype(dtype), shape=shape, shared_name=name, container="keras_replicator"
    )
    return resource_variable_ops.BaseResourceVariable(
        trainable=False,
        shape=shape,
        dtype=dtype,
        handle=handle,
        name=name,
        handle_name=name,
        unique_id=name,
        in_graph_mode=False,
    )


def schedule(coordinator, function, arguments, finished):
    """Runs a function on whichever worker is free; again on another one when that worker dies.

    Args:
        coordinator: A `ClusterCoordinator`.
        function: A concrete function.
        arguments: Its arguments.
        finished: Called once as `finished(worker, outputs)`, in another thread.

    Returns:
        An object that must be held until `finished` was called.

    Raises:
        Exception: What a function that was scheduled before has failed with.
    """
    from tensorflow.python.distribute.coordinator import cluster_coordinator

    class Once(cluster_coordinator.Closure):
        def execute_on(self, worker):
            super().execute_on(worker)
            outputs = []
            # Fetched here, where the loss of the worker still puts the closure back.
            self.maybe_call_with_output_remote_value(lambda remote: outputs.append(remote.get()))
            if outputs:
                finished(worker.worker_index, outputs[0])

    cluster = coordinator._cluster
    closure = Once(function, cluster.closure_queue._cancellation_mgr, args=arguments)
    held = closure.build_output_remote_value()
    cluster.closure_queue.put(closure)
    return held


def count_up(variable):
    """Adds one to an integer variable in one piece; returns what it was before."""
    return tf.raw_ops.ResourceCountUpTo(resource=variable.handle, limit=2**62, T=variable.dtype)


def embeddings_of(layer):
    """Returns the Keras variable of an `Embedding` layer, or None before it is built."""
    return getattr(layer, "_embeddings", None)


def add_variable_like(optimizer, reference_variable, name=None, initializer="zeros"):
    """Adds an optimizer variable as Keras does, without TensorFlow's colocation."""
    from keras.src.optimizers import base_optimizer

    return base_optimizer.BaseOptimizer.add_variable_from_reference(
        optimizer, reference_variable, name=name, initializer=initializer
    )


def near_variable(variable):
    """Context: variables are made on the server of another one (None: on the next server)."""
    if variable is None:
        return contextlib.nullcontext()
    return tf.distribute.get_strategy().extended.colocate_vars_with(variable)


def watch_handle(variable):
    """Lets every tape watch the `handle` of an object with the attribute `trainable`."""
    from tensorflow.python.eager import tape

    tape.variable_accessed(variable)


def worker_iterators(coordinator, functions):
    """Makes an iterator on each worker, again on one that comes back.

    Args:
        coordinator: A `ClusterCoordinator`.
        functions: For each worker a concrete function that returns a data set.

    Returns:
        What a scheduled function takes as its argument: the iterator of its worker.
    """
    values = []
    for worker, function in zip(coordinator._cluster.workers, functions):
        value = worker.create_resource(lambda function=function: iter(function()))
        value._type_spec = tf.data.IteratorSpec(function.structured_outputs.element_spec)
        values.append(value)
    return tf.distribute.experimental.coordinator.PerWorkerValues(values)
