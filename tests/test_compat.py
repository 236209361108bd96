"""compat: every private name of Keras and TensorFlow that the package uses is where it was.

When one of these tests fails on a new version of Keras or TensorFlow, a private name has moved or
changed: adapt `keras_replicator/compat.py`, then the tables here. A private name that is new in
compat.py needs a row in a table; `test_every_private_name_is_guarded` says which.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from keras_replicator import compat
from tests.helpers import REPOSITORY, assert_close, regression, run_script, sequential

VERSIONS = f"keras {keras.__version__}, tensorflow {tf.__version__}"
PRIVATE_MODULES = ("keras.src", "tensorflow.python", "tensorflow.compiler")

# What `around` wraps, with its parameters.
WRAPPED = {
    "add_optimizer_variable": ["self", "reference_variable", "name", "initializer"],
    "apply": ["self", "grads", "trainable_variables"],
    "apply_scaled": ["self", "grads", "trainable_variables"],
    "build_losses": ["self", "y_true", "y_pred"],
    "call_layer": ["self", "args", "kwargs"],
    "embedding_build": ["self", "input_shape"],
    "embedding_call": ["self", "inputs"],
    "initialize": ["self", "value"],
    "keras_cond": ["pred", "true_fn", "false_fn"],
    "moments": ["self", "inputs", "mask"],
    "next_seed": ["self", "ordered"],
    "optimizer_add_like": ["self", "reference_variable", "name", "initializer"],
    "optimizer_add_variable": [
        "self",
        "shape",
        "initializer",
        "dtype",
        "aggregation",
        "layout",
        "name",
    ],
    "optimizer_assign": ["self", "variable", "value"],
    "optimizer_assign_add": ["self", "variable", "value"],
    "optimizer_assign_sub": ["self", "variable", "value"],
    "overwrite_with_average": ["self", "trainable_variables"],
    "scale_loss": ["value"],
    "tf_apply_scaled": ["self", "grads", "trainable_variables"],
    "unscale_loss": ["value"],
    "update_mean": ["self", "values", "sample_weight"],
    "update_step": ["self", "grads", "trainable_variables", "learning_rate"],
    "variable_assign": ["self", "value"],
    "variable_assign_add": ["self", "value"],
    "variable_assign_sub": ["self", "value"],
    "weight_decay": ["self", "variables"],
}


def call(*arguments, **named):
    """The arguments with which compat.py calls a function."""
    return arguments, named


ADAPTERS = "keras.src.trainers.data_adapters"
CONTEXT = "tensorflow.python.eager.context"
COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"
SELF = object()

# What compat.py calls, and how.
CALLED = {
    f"{ADAPTERS}.get_data_adapter": call(
        1, 2, sample_weight=3, batch_size=4, steps_per_epoch=5, shuffle=6, class_weight=7
    ),
    f"{ADAPTERS}.array_slicing.convert_to_sliceable": call(1, target_backend="tensorflow"),
    f"{ADAPTERS}.array_slicing.train_validation_split": call(1, validation_split=0.5),
    f"{ADAPTERS}.data_adapter_utils.unpack_x_y_sample_weight": call(1),
    f"{ADAPTERS}.data_adapter_utils.class_weight_to_sample_weights": call(1, 2),
    f"{ADAPTERS}.tf_dataset_adapter.make_class_weight_map_fn": call(1),
    f"{CONTEXT}.context": call(),
    f"{CONTEXT}.Context.configure_coordination_service": call(
        SELF,
        service_type="standalone",
        service_leader="leader",
        coordinated_jobs=[],
        cluster_register_timeout_in_ms=1,
        heartbeat_timeout_in_ms=1,
    ),
    f"{CONTEXT}.Context.abort_collective_ops": call(SELF, 14, "message"),
    f"{CONTEXT}.Context.check_collective_ops_peer_health": call(SELF, "task", 1),
    f"{CONTEXT}.Context.get_config_key_value": call(SELF, "key", timeout_in_ms=1),
    f"{CONTEXT}.Context.set_config_key_value": call(SELF, "key", "value"),
    f"{CONTEXT}.global_seed": call(),
    "keras.Model._compute_loss": call(SELF, x=1, y=2, y_pred=3, sample_weight=4, training=True),
    "keras.Model._flatten_layers": call(SELF),
    "keras.Model._flatten_metrics_in_order": call(SELF, {}),
    "keras.Model._should_eval": call(SELF, 1, 2),
    "keras.Model._symbolic_build": call(SELF, data_batch=()),
    "keras.callbacks.BackupAndRestore._save_model": call(SELF),
    "keras.callbacks.BackupAndRestore.on_train_end": call(SELF),
    "keras.optimizers.LossScaleOptimizer._common_apply": call(SELF, [], []),
    "keras.optimizers.Optimizer._use_weight_decay": call(SELF, "variable"),
    "keras.optimizers.Optimizer._var_key": call(SELF, "variable"),
    "keras.Variable._deferred_initialize": call(SELF),
    "keras.src.backend.common.global_state.get_global_attribute": call("name"),
    "keras.src.backend.common.global_state.set_global_attribute": call("name", None),
    "keras.src.backend.get_keras_mask": call("tensor"),
    "keras.src.losses.loss.squeeze_or_expand_to_same_rank": call(1, 2),
    "keras.src.optimizers.base_optimizer.BaseOptimizer.add_variable_from_reference": call(
        SELF, "variable", name="name", initializer="zeros"
    ),
    "keras.src.random.seed_generator.global_seed_generator": call(),
    "keras.src.utils.python_utils.pythonify_logs": call({}),
    "tensorflow.python.client.device_lib.list_local_devices": call(),
    "tensorflow.python.framework.op_callbacks.add_op_callback": call("function"),
    "tensorflow.python.framework.op_callbacks.remove_op_callback": call("function"),
    "keras.src.utils.tracking.Tracker": call({}, exclusions=None),
    "tensorflow.python.data.experimental.ops.distribute._AutoShardDataset": call("data", 2, 0),
    "tensorflow.python.distribute.collective_all_reduce_strategy"
    ".CollectiveAllReduceExtended._get_variable_creator_initial_value": call(
        SELF, 0, "device", None, initial_value=1
    ),
    "tensorflow.python.eager.backprop._gradient_function": call(
        "Add", (), 2, [], [], [], (), "scope"
    ),
    "tensorflow.python.distribute.collective_all_reduce_strategy"
    ".CollectiveAllReduceExtended._initialize_local_devices": call(SELF, "resolver", "device"),
    "tensorflow.python.distribute.values.DistributedVariable._get_on_device_or_primary": call(SELF),
    f"{COORDINATOR}.Closure": call("function", "manager", args=()),
    f"{COORDINATOR}.Closure.build_output_remote_value": call(SELF),
    f"{COORDINATOR}.Closure.execute_on": call(SELF, "worker"),
    f"{COORDINATOR}.Closure.maybe_call_with_output_remote_value": call(SELF, "method"),
    f"{COORDINATOR}.Worker.create_resource": call(SELF, "function"),
    f"{COORDINATOR}._CoordinatedClosureQueue.put": call(SELF, "closure"),
    "tensorflow.python.eager.tape.variable_accessed": call("variable"),
}

# Classes and modules that compat.py imports for their type.
IMPORTED = [
    f"{ADAPTERS}.array_data_adapter.ArrayDataAdapter",
    "keras.src.callbacks.callback_list.CallbackList",
    "keras.src.saving.keras_saveable.KerasSaveable",
    "keras.src.trainers.compile_utils.CompileMetrics",
    "keras.src.trainers.data_adapters.generator_data_adapter.GeneratorDataAdapter",
    "tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2.CoordinatedJob",
    "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended",
    "tensorflow.python.distribute.ps_values.CachingVariable",
    "tensorflow.python.distribute.values.DistributedVariable",
    *(f"{module}.{name}" for module, names in compat.RANDOM_OPERATIONS.items() for name in names),
    "tensorflow.python.ops.resource_variable_ops.ResourceVariable",
    "tensorflow.python.ops.resource_variable_ops.UninitializedVariable",
    "tensorflow.python.pywrap_tfe.TFE_Py_RegisterGradientFunction",
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable",
]


@functools.cache
def trained_model():
    """A plain Keras model with every kind of thing whose attributes compat.py reads."""
    model = sequential((3,), layers.Dropout(0.5, seed=1), layers.Dense(1))
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, weight_decay=0.1)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.fit(*regression(4), batch_size=4, verbose=0)
    return model


def excluding_optimizer():
    optimizer = keras.optimizers.SGD(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def test_tracker_knows_what_it_stores():
    """A metric is copied with its tracker, whose ids then are those of the copied variables."""
    tracker = keras.metrics.Mean()._tracker
    (_, store), ids = tracker.config["variables"], tracker.stored_ids["variables"]
    assert ids == {id(variable) for variable in store}


def restored_model():
    """A model whose BackupAndRestore has found an epoch to go on from."""
    model = keras.Model()
    source = inspect.getsource(keras.callbacks.BackupAndRestore)
    assert "self.model._initial_epoch" in source, (
        f"keras.callbacks.BackupAndRestore does not set model._initial_epoch any more ({VERSIONS})"
    )
    model._initial_epoch = 1
    return model


def tensorboard_of_a_fit():
    board = keras.callbacks.TensorBoard("logs")
    assert isinstance(type(board)._train_writer, property)
    return type(board)


def mirrored_variable():
    with two_replicas().scope():
        return keras.Variable(1.0)._value


def four_batches():
    return tf.data.Dataset.range(8).batch(2)


def py_dataset():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return np.ones((1, 1))

    return Batches()


def two_replicas():
    """A strategy of plain `tf.distribute`, as a user of Keras makes it."""
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def built_embedding():
    layer = layers.Embedding(2, 1)
    layer.build()
    return layer


def remote_value():
    values = resolve("tensorflow.python.distribute.coordinator.values")
    return values.RemoteValueImpl(None, None)


def coordinator_without_cluster(owner, *attributes):
    """Stands for an object that needs a cluster; its constructor sets these attributes."""
    source = inspect.getsource(resolve(f"{COORDINATOR}.{owner}.__init__"))
    for name in attributes:
        assert f"self.{name} = " in source, f"{owner} does not set {name} any more ({VERSIONS})"
    return types.SimpleNamespace(**dict.fromkeys(attributes))


# Attributes that compat.py reads or sets, each with an object that must have it.
ATTRIBUTES = {
    "_aggregation": mirrored_variable,
    "_call_has_training_arg": trained_model,
    "_cloned_datasets": lambda: two_replicas().experimental_distribute_dataset(four_batches()),
    "_cancellation_mgr": lambda: coordinator_without_cluster(
        "_CoordinatedClosureQueue", "_cancellation_mgr"
    ),
    "_cluster": lambda: coordinator_without_cluster("ClusterCoordinator", "_cluster"),
    "_compile_config": trained_model,
    "_compile_loss": trained_model,
    "_compile_metrics": trained_model,
    "_context_handle": lambda: importlib.import_module(CONTEXT).context(),
    "_cross_device_ops": lambda: two_replicas().extended,
    "_datasets": lambda: two_replicas().distribute_datasets_from_function(
        lambda context: four_batches()
    ),
    "_devices": lambda: two_replicas().extended,
    "_distribute_strategy": mirrored_variable,
    "_embeddings": built_embedding,
    "_flat_losses": lambda: trained_model()._compile_loss,
    "_distribution_strategy": keras.optimizers.SGD,
    "_exclude_from_weight_decay": excluding_optimizer,
    "_exclude_from_weight_decay_pattern": excluding_optimizer,
    "_get_variable_creator_initial_value": lambda: (
        importlib.import_module(
            "tensorflow.python.distribute.collective_all_reduce_strategy"
        ).CollectiveAllReduceExtended
    ),
    "_fn": lambda: keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
    "_initial_epoch": restored_model,
    "_inputs": lambda: compat.adapter_for(
        np.ones(2), batch_size=1, steps=None, shuffle=False, class_weight=None
    ),
    "_iterations": keras.optimizers.SGD,
    "_keras_mask": lambda: layers.Masking()(np.ones((1, 2, 3), "float32")),
    "_layers": trained_model,
    "_learning_rate": keras.optimizers.SGD,
    "_loss_tracker": trained_model,
    "_metrics": lambda: layers.Dense(1),
    "_model_variables_moving_average": lambda: trained_model().optimizer,
    "_iterator_resource": lambda: iter(tf.data.Dataset.range(1)),
    "_omit_frequent_tracing_warning": lambda: tf.function(lambda: None),
    "_output_signature": lambda: compat.adapter_for(
        py_dataset(), batch_size=None, steps=None, shuffle=False, class_weight=None
    ),
    "_seed_generators": lambda: layers.Dropout(0.5),
    "_seed": lambda: tf.data.Dataset.range(2).shuffle(2),
    "_seed2": lambda: tf.data.Dataset.range(2).shuffle(2),
    "_should_trace": lambda: keras.callbacks.TensorBoard("logs"),
    "_train_writer": tensorboard_of_a_fit,
    "_type_spec": remote_value,
    "_trainable_variables": lambda: trained_model().optimizer,
    "_user_loss": lambda: trained_model()._compile_loss,
    "_value": lambda: keras.Variable(1.0),
}

# Names with an underscore that are no private ones.
PUBLIC = {"_replace", "_exit"}  # of named tuples, of os

# Functions that take the name of an attribute.
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "__getattr__", "__setattr__", "__delattr__"}


def resolve(path):
    """Returns what a dotted path names, or fails with the part that is missing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for name in parts[length:]:
            if not hasattr(thing, name):
                pytest.fail(
                    f"{path} has moved: {thing.__name__} has no {name} ({VERSIONS}). "
                    "Adapt keras_replicator/compat.py."
                )
            thing = getattr(thing, name)
        return thing
    pytest.fail(f"{path} has moved: no module {parts[0]} ({VERSIONS}).")


# Names


def test_every_wrapped_name_is_in_the_table():
    assert sorted(WRAPPED) == compat.wrappable_names()


@pytest.mark.parametrize("name", compat.wrappable_names())
def test_signature_of_a_wrapped_function(name):
    module, owner, attribute = compat._WRAPPABLE[name]
    path = ".".join(filter(None, (module, owner, attribute)))
    found = list(inspect.signature(resolve(path)).parameters)
    assert found == WRAPPED[name], (
        f"{path} has other parameters than the wrapper '{name}' expects ({VERSIONS}). "
        "Adapt the function that compat.around wraps it with."
    )


@pytest.mark.parametrize("path", CALLED)
def test_signature_of_a_called_function(path):
    arguments, named = CALLED[path]
    signature = inspect.signature(resolve(path))
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        pytest.fail(f"{path}{signature} does not take what compat.py passes: {error} ({VERSIONS}).")


@pytest.mark.parametrize("path", IMPORTED)
def test_imported_name(path):
    resolve(path)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(name):
    owner = ATTRIBUTES[name]()
    assert hasattr(owner, name), (
        f"{type(owner).__module__}.{type(owner).__name__} has no attribute {name} any more "
        f"({VERSIONS}). Adapt keras_replicator/compat.py."
    )


def test_loss_entries_can_be_replaced():
    """Resolved losses are named tuples with the field `loss`."""
    (entry,) = compat.flat_losses(compat.compile_loss(trained_model()))
    assert entry._replace(loss=None).loss is None


def test_context_is_the_class_in_the_table():
    """`context.context()` gives the class whose methods are guarded above."""
    assert type(resolve(f"{CONTEXT}.context")()) is resolve(f"{CONTEXT}.Context")


def private_names(tree):
    """(line, name) of every private attribute and private module of a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and is_private_module(node.module or ""):
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if is_private_module(a.name))
        elif isinstance(node, ast.Constant) and is_private_module(str(node.value)):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and named(node.func) in BY_NAME:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and is_private(str(argument.value)):
                    yield node.lineno, argument.value


def named(function):
    """The name by which a function is called: `f` for `f()` and for `x.f()`."""
    return getattr(function, "attr", getattr(function, "id", None))


def is_private(name):
    return re.fullmatch(r"_[a-z]\w*|__internal__", name) is not None and name not in PUBLIC


def is_private_module(name):
    return re.fullmatch(rf"({'|'.join(map(re.escape, PRIVATE_MODULES))})(\.\w+)*", name) is not None


def guarded_names():
    """The private attributes that the tables above guard."""
    wrapped = {attribute for _, _, attribute in compat._WRAPPABLE.values()}
    return {*ATTRIBUTES, *wrapped, *(path.rpartition(".")[2] for path in CALLED)}


def test_every_private_name_is_guarded():
    modules = [module for module, _, _ in compat._WRAPPABLE.values()]
    unguarded = [
        f"compat.py:{line}: {name}"
        for line, name in private_names(ast.parse(inspect.getsource(compat)))
        if name not in guarded_names()
        and not any(f"{path}.".startswith(f"{name}.") for path in [*CALLED, *IMPORTED, *modules])
    ]
    assert not unguarded, "Give these private names a row in a table of tests/test_compat.py."


def own_names(tree):
    """The names that a file defines itself: functions, variables, attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if named(node.value) in ("self", "cls"):
                yield node.attr


def test_no_private_name_outside_of_compat():
    """STYLE: a private name of Keras or TensorFlow is in compat.py only.

    Names that the package defines are its own, except where Keras has the same: those are its own
    in the file that defines them.
    """
    folders = ("keras_replicator", "callbacks", "examples", "benchmarks")
    trees = {
        path.relative_to(REPOSITORY): ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path.name != "compat.py"
    }
    assert len(trees) > 40
    own = {path: set(own_names(tree)) for path, tree in trees.items()}
    ours = set().union(*own.values()) - guarded_names()
    found = [
        f"{path}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in sorted(private_names(tree))
        if name not in own[path] | ours
    ]
    assert not found, "Move these to keras_replicator/compat.py:\n" + "\n".join(found)


# Behaviour of the wrappers


def whole_model():
    """Every wrapped function has something to do when this one trains."""
    return sequential(
        (3,),
        layers.Dense(4, use_bias=False, kernel_initializer=keras.initializers.HeNormal(seed=3)),
        layers.BatchNormalization(),
        layers.Dropout(0.5, seed=7),
        layers.Dense(1, kernel_initializer=keras.initializers.HeNormal(seed=4)),
    )


def whole_optimizer():
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(
            0.1, amsgrad=True, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=1
        ),
        initial_scale=8.0,
    )


def run(compile_and_fit):
    keras.utils.set_random_seed(0)
    model = whole_model()
    history = compile_and_fit(model)
    return {"weights": model.get_weights(), "history": history}


def keras_fit(model):
    model.compile(whole_optimizer(), "mse", metrics=["mae"])
    x, y = regression(12)
    return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history


@pytest.fixture
def without_wrappers(monkeypatch):
    """Function that puts Keras' own functions back until the end of the test."""

    def remove():
        for name in compat.wrappable_names():
            owner, attribute = compat.lookup(name)
            monkeypatch.setattr(owner, attribute, getattr(owner, attribute).__wrapped__)

    return remove


def test_keras_calls_what_is_wrapped(monkeypatch):
    """A name that still exists and that Keras calls no more would be wrapped in vain."""
    counts = dict.fromkeys(compat.wrappable_names(), 0)

    def counted(name, function):
        def counting(*arguments, **named):
            counts[name] += 1
            return function(*arguments, **named)

        return counting

    for name in counts:
        owner, attribute = compat.lookup(name)
        monkeypatch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
    run(keras_fit)
    embedding = layers.Embedding(2, 1)
    embedding(np.zeros(1, "int32"))
    embedding.embeddings.assign_sub(embedding.embeddings)
    unused = [name for name, count in counts.items() if count == 0]
    assert not unused, f"Keras trains without calling these any more ({VERSIONS})."


def test_outside_of_a_step_keras_is_itself(without_wrappers):
    """keras.Model.fit gives the same bits with and without the package."""
    ours = run(keras_fit)
    without_wrappers()
    keras.backend.clear_session()
    assert_close(ours, run(keras_fit), rtol=0)


def strategy_loop(model, strategy):
    """Two updates in a loop of plain tf.distribute, as in TensorFlow's guide."""
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0), "mse")
    x, y = regression(8)
    metric = keras.metrics.MeanSquaredError()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)

    def step(inputs):
        x, y = inputs
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = keras.losses.MeanSquaredError()(y, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        metric.update_state(y, predictions)
        return loss

    run_step = tf.function(lambda batch: strategy.run(step, (batch,)))
    losses = [
        float(strategy.reduce("SUM", run_step(batch), axis=None))
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    return {"losses": losses, "metric": float(metric.result())}


# TensorFlow itself says that the last batches were not read.
@pytest.mark.filterwarnings("ignore")
def test_under_a_plain_strategy_keras_is_itself(without_wrappers):
    """A loop under tf.distribute outside of the trainer gives the same bits as before."""

    def in_scope():
        strategy = two_replicas()
        with strategy.scope():
            return run(lambda model: strategy_loop(model, strategy))

    ours = in_scope()
    without_wrappers()
    keras.backend.clear_session()
    assert_close(ours, in_scope(), rtol=0)


def test_losses_under_a_plain_strategy_are_scaled():
    """Outside of the trainer a loss of 1 is 1/2 on each of two replicas, as Keras has it."""
    strategy, loss = two_replicas(), keras.losses.MeanSquaredError()
    values = strategy.run(lambda: loss(tf.ones((2, 1)), tf.zeros((2, 1))))
    assert [float(value) for value in strategy.experimental_local_results(values)] == [0.5, 0.5]


def test_losses_in_the_trainer_are_not_scaled():
    """In a step of the trainer it is 1 (contract, point 8)."""
    trainer = kr.ReplicatedTrainer(lambda: sequential((1,), layers.Dense(1)), devices=2)
    loss = keras.losses.MeanSquaredError()
    values = trainer.run(lambda y: loss(y, tf.zeros_like(y)), np.ones((4, 1), "float32"))
    assert [float(value) for value in values] == [1.0, 1.0]


# Behaviour of the readers


def test_variables_of_two_replicas():
    strategy = two_replicas()
    with strategy.scope():
        variable = keras.Variable(3.0)
        total = keras.metrics.Sum().total
    plain = keras.Variable(3.0)
    assert (compat.is_distributed(variable), compat.is_distributed(plain)) == (True, False)
    assert compat.strategy_of(variable) is strategy
    assert compat.strategy_of(plain) is None
    assert compat.local_copy(plain) is compat.raw_variable(plain) is plain.value
    assert len(compat.replica_copies(variable)) == 2
    assert len(compat.replica_copies(plain)) == 1
    assert (int(variable), float(variable)) == (3, 3.0)

    def add_own_number():
        number = compat.static_replica_id(tf.distribute.get_replica_context())
        compat.local_copy(total).assign_add(number + 1.0)

    strategy.run(add_own_number)
    assert [float(copy) for copy in compat.replica_copies(total)] == [1.0, 2.0]
    with strategy.scope():
        assert float(total) == 3.0
        compat.mark_first_replica_only(total)
        assert float(total) == 1.0


def test_readers_of_a_trained_model():
    model = trained_model()
    assert compat.loss_tracker(model).name == "loss"
    with_state = [metric for metric in compat.leaf_metrics(model) if metric.variables]
    assert {"loss", "mae"} <= {metric.name for metric in with_state}
    assert [state.shape for state in compat.seed_states(model)] == [(2,)]
    assert compat.compile_config(model)["loss"] == "mse"
    assert compat.known_variables(model.optimizer) == model.trainable_variables
    assert len(compat.moving_averages(model.optimizer)) == 2
    assert compat.decays(model.optimizer, model.trainable_variables[0])
    assert compat.schedule_of(model.optimizer) is None
    assert compat.flatten_metrics_in_order(model, {"loss": 1.0}) == 1.0
    assert compat.metric_results(model).keys() == {"loss", "mae"}
    assert [compat.should_eval(model, epoch, 2) for epoch in range(4)] == [False, True] * 2


def test_seed_of_everything():
    """Also of the global generator, from which layers without a seed and keras.random draw."""

    def draw():
        compat.set_random_seed(3)
        compat.ensure_global_seed_generator()
        return [float(keras.random.normal(())) for _ in range(2)], float(np.random.normal())

    assert draw() == draw()
    assert compat.global_seed_state().numpy().shape == (2,)


def test_schedule_of_an_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    assert compat.schedule_of(keras.optimizers.SGD(schedule)) is schedule


def test_mask_travels_with_a_tensor():
    masked = layers.Masking()(np.array([[[0.0], [1.0]]], "float32"))
    assert compat.get_mask(masked).numpy().tolist() == [[False, True]]
    assert compat.get_mask(tf.ones(1)) is None


def test_array_adapter():
    adapter = compat.adapter_for(
        *regression(4), batch_size=2, steps=None, shuffle=False, class_weight=None
    )
    assert compat.is_array_adapter(adapter)
    x, y = compat.to_sliceable(compat.array_adapter_inputs(adapter))
    assert (x.shape, y.shape) == ((4, 3), (4, 1))


def test_importing_the_package_does_not_start_tensorflow():
    """Else `simulate_devices` would always come too late; and TensorFlow tells when it has."""
    result = run_script(
        "import tensorflow as tf, keras_replicator as kr\n"
        "from keras_replicator import compat\n"
        "before = compat.tensorflow_started()\n"
        "tf.ones(1)\n"
        "print('started:', before, compat.tensorflow_started())"
    )
    assert "started: False True" in result.stdout, result.stdout


# Versions


@pytest.mark.parametrize(
    "name, module, version, right",
    [
        ("tensorflow", tf, "2.19.1", ">= 2.20"),
        ("keras", keras, "3.11.3", ">= 3.12"),
        ("tensorflow", tf, "1.15.0", ">= 2.20"),
    ],
)
def test_old_versions_are_refused(monkeypatch, name, module, version, right):
    monkeypatch.setattr(module, "__version__", version)
    wanted = right.removeprefix(">= ")
    message = (
        f"keras_replicator needs {name} {right}. Upgrade it with "
        f"`pip install --upgrade '{name}>={wanted}'`. Received: {name}=={version}"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        compat.check_versions()


@pytest.mark.parametrize("version", ["2.20.0", "2.21.0-rc1", "2.100.0", "3.0.0.dev1"])
def test_new_versions_are_taken(monkeypatch, version):
    monkeypatch.setattr(tf, "__version__", version)
    compat.check_versions()


def test_other_backends_are_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="KERAS_BACKEND=tensorflow .* Received: .*'jax'"):
        compat.check_versions()


REFUSED = (
    "ImportError: keras_replicator needs Keras' TensorFlow backend. Set the environment variable "
    "KERAS_BACKEND=tensorflow before Keras is imported. Received: keras.backend.backend()="
)


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
def test_import_under_another_backend(backend):
    # Keras' NumPy backend needs JAX, too.
    if importlib.util.find_spec("jax" if backend == "numpy" else backend) is None:
        pytest.skip(f"what the backend {backend} needs is not installed")
    result = run_script("import keras_replicator", KERAS_BACKEND=backend)
    assert result.returncode != 0
    assert result.stdout.strip().splitlines()[-1] == f"{REFUSED}'{backend}'"


def test_import_under_a_backend_that_is_pretended():
    """The same without one installed: the refusal comes before anything else of the package."""
    result = run_script(
        "import keras\nkeras.backend.backend = lambda: 'jax'\nimport keras_replicator"
    )
    assert result.returncode != 0
    assert result.stdout.strip().splitlines()[-1] == f"{REFUSED}'jax'"


def test_the_queue_of_a_coordinator():
    """`Cluster` holds the queue of closures, and a worker its number."""
    coordinator_without_cluster("Cluster", "closure_queue", "workers")
    coordinator_without_cluster("Worker", "worker_index")


def test_a_variable_of_the_worker_that_runs_a_function():
    """It takes a value, adds up, and is what a Keras variable reads meanwhile."""
    mean = keras.metrics.Mean()

    @tf.function(autograph=False)
    def run():
        copies = [
            compat.local_variable(f"copy_{i}", variable.shape, variable.dtype)
            for i, variable in enumerate(mean.variables)
        ]
        for copy in copies:
            copy.assign(tf.zeros(copy.shape, copy.dtype))
        with compat.stand_ins(mean.variables, copies):
            mean.update_state([1.0, 2.0])
        return [copy.read_value() for copy in copies]

    assert [float(value) for value in run()] == [3.0, 2.0]
    assert [float(value) for value in mean.variables] == [0.0, 0.0]


def test_count_up_is_one_operation():
    variable = tf.Variable(5, dtype=tf.int64)
    assert [int(compat.count_up(variable)) for _ in range(2)] == [5, 6]
    assert int(variable) == 7


def test_a_handle_that_tapes_watch():
    """The gradient of what depends on the handle of any object comes to that object."""

    @tf.function(autograph=False)
    def gradient():
        anchor = types.SimpleNamespace(handle=tf.zeros([]), trainable=True)
        with tf.GradientTape() as tape:
            compat.watch_handle(anchor)
            value = anchor.handle * 3.0
        return tape.gradient(value, anchor.handle)

    assert float(gradient()) == 3.0


def test_collectives_have_numbers_of_their_own():
    """By place, kind, type and shape: TensorFlow refuses another collective under a number."""
    keys = [
        int(compat.instance_key(tag, kind, tf.zeros(shape, dtype)))
        for tag in (0, 1, 2, 1025, 2048)
        for kind in range(3)
        for dtype in ("float32", "float16", "int32", "bool")
        for shape in ((), (1,), (2,), (3, 1), (1, 2), (4, 5), (8, 3), (0, 2), (2, 1, 1))
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**31 for key in keys)
