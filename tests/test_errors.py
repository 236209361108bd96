"""One error per mistake: what is wrong, which argument, what was received, and the fix."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import cpus

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def compiled(replicas=2, model=build, **options):
    trainer = kr.ReplicatedTrainer(model, devices=cpus(replicas), **options)
    trainer.compile("sgd", "mse")
    return trainer


def fails(kind, *parts):
    """Expects an error that holds every part."""
    pattern = "".join(f"(?=.*{part})" for part in parts)
    return pytest.raises(kind, match=f"(?s){pattern}")


def test_more_devices_than_found():
    with fails(ValueError, "devices", "99", "simulate_devices"):
        kr.ReplicatedTrainer(build, devices=99)


def test_model_of_another_strategy():
    other = tf.distribute.MirroredStrategy(
        cpus(2), cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with other.scope():
        model = build()
    with fails(ValueError, "another strategy", "MirroredStrategy", "strategy=strategy"):
        kr.ReplicatedTrainer(model, devices=cpus(3))


def test_weights_that_were_made_before():
    model = build()
    with fails(ValueError, "made before it was called", r"ReplicatedTrainer\(model\)"):
        kr.ReplicatedTrainer(lambda: model, devices=cpus(2))


@pytest.mark.parametrize("name", ["peer_timeout", "start_timeout"])
@pytest.mark.parametrize("seconds", [0, -1, "60", True])
def test_timeouts(name, seconds):
    with fails(ValueError, name, "above 0", f"{name}={seconds!r}"):
        kr.ReplicatedTrainer(build, **{name: seconds})


def test_functions_that_take_something_else():
    with fails(TypeError, "model", "without arguments", "missing"):
        kr.ReplicatedTrainer(lambda units: build(), devices=cpus(1))
    with fails(TypeError, "train_step", r"fn\(model, batch\)"):
        kr.ReplicatedTrainer(build, devices=cpus(1), train_step=lambda model: {})
    with fails(TypeError, "must return a keras.Model", "{}"):
        kr.ReplicatedTrainer(dict, devices=cpus(1))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("epochs", "3", "int of at least 0"),
        ("epochs", 1.5, "int of at least 0"),
        ("initial_epoch", -1, "int of at least 0"),
        ("verbose", "loud", "'auto', 0, 1 or 2"),
        ("callbacks", ["x"], "keras.callbacks.Callback"),
        ("callbacks", 3, "keras.callbacks.Callback"),
        ("validation_split", 1.5, "from 0 to below 1"),
        ("validation_freq", 0, "int of at least 1"),
        ("shuffle", "often", "True, False or 'batch'"),
        ("class_weight", [1, 2], "dict from class numbers"),
    ],
)
def test_arguments_of_fit(name, value, message):
    with fails((TypeError, ValueError), name, message, "Received"):
        compiled().fit(X, Y, **{"verbose": 0, name: value})


@pytest.mark.parametrize("name", ["sync_batch_norm", "run_eagerly"])
def test_flags_of_compile(name):
    with fails(ValueError, name, "True or False", "'yes'"):
        kr.ReplicatedTrainer(build, devices=cpus(1)).compile("sgd", "mse", **{name: "yes"})


def test_compiled_and_eager_at_once():
    with fails(ValueError, "jit_compile=True", "run_eagerly=True"):
        compiled().compile("sgd", "mse", jit_compile=True, run_eagerly=True)


def test_model_that_is_none():
    with fails(TypeError, "model", "Received: model=3"):
        kr.ReplicatedTrainer(3, devices=cpus(1))
    with fails(TypeError, "must return a keras.Model", "None"):
        kr.ReplicatedTrainer(lambda: None, devices=cpus(1))


class Unconfigured(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(len(units))

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        raise NotImplementedError


def test_model_without_config():
    with fails(ValueError, "cannot be made anew", "function without arguments"):
        kr.ReplicatedTrainer(Unconfigured([1]), devices=cpus(2))


class Sized(keras.Model):
    """Keras writes no argument of a subclass into its config."""

    def __init__(self, units=4, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(units)

    def call(self, inputs):
        return self.dense(inputs)


def test_model_whose_config_forgets_its_arguments():
    with fails(ValueError, "cannot be made anew", "units", "function without arguments"):
        kr.ReplicatedTrainer(Sized(5), devices=cpus(2))
    (model := Sized(5))(X)
    with fails(ValueError, "config alone", r"lambda: Sized\(…\)", r"\(3, 5\)", r"\(3, 4\)"):
        kr.ReplicatedTrainer(model, devices=cpus(2))
    (model := Sized())(X)
    assert kr.ReplicatedTrainer(model, devices=cpus(2)).num_replicas == 2


@pytest.mark.parametrize("batch_size", [0, -1, 2.5])
def test_batch_size(batch_size):
    with fails(ValueError, "batch_size", "at least 1", f"batch_size={batch_size}"):
        compiled().fit(X, Y, batch_size=batch_size)


@pytest.mark.parametrize(
    "data",
    [
        (X[:0], Y[:0]),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).take(0),),
        (tf.data.Dataset.from_tensor_slices((X, Y)).batch(2).filter(lambda x, y: False),),
    ],
    ids=["arrays", "tf.data", "tf.data of unknown size"],
)
def test_empty_data(data):
    with pytest.raises(ValueError, match="no rows|no batches"):
        compiled().fit(*data, verbose=0)


def test_mismatched_rows():
    with fails(ValueError, "cardinality|same number", "8", "7"):
        compiled().fit(X, Y[:7])


def test_missing_loss():
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    trainer.compile("sgd")
    with fails(ValueError, "No loss to compute", "loss"):
        trainer.fit(X, Y, verbose=0)


@pytest.mark.parametrize("optimizer", [None, {"a": "sgd"}])
def test_missing_optimizer(optimizer):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    trainer.compile(optimizer, "mse")
    with fails(ValueError, "optimizer", "compile", "train_step", "None"):
        trainer.fit(X, Y, verbose=0)


def test_optimizer_that_accumulates_on_its_own():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)

    def step(model, batch):
        variables = model.trainable_variables
        optimizer.apply([tf.zeros_like(variable) for variable in variables], variables)
        return {}

    with fails(ValueError, "gradient_accumulation_steps=2", "trainer.compile"):
        compiled(train_step=step).fit(X, Y, verbose=0)


def test_shapes_that_do_not_fit():
    with fails(ValueError, "expected shape=|incompatible", "4"):
        compiled().fit(np.ones((8, 4), "float32"), Y, verbose=0)


def test_no_data():
    for call in (lambda: compiled().fit(), lambda: compiled().predict(None)):
        with fails(ValueError, "`x` holds no data", "tf.data.Dataset", "None"):
            call()
    with fails(ValueError, "validation_data", "3"):
        compiled().fit(X, Y, validation_data=3, verbose=0)
    with fails(ValueError, "batch_size", "0"):
        compiled().fit(X, Y, validation_data=(X, Y), validation_batch_size=0, verbose=0)


def test_no_targets():
    for call in (compiled().fit, compiled().evaluate):
        with fails(ValueError, "no targets", "Pass `y`", "y=None"):
            call(X, verbose=0)


@pytest.mark.parametrize("loss", [["mse", "mae"], {"other": "mse"}])
def test_losses_for_other_outputs(loss):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    trainer.compile("sgd", loss)
    with fails(ValueError, "one output", "loss", "(2 losses|other)"):
        trainer.fit(X, Y, verbose=0)


def test_inside_of_a_graph_or_of_another_scope():
    trainer = compiled()
    with fails(RuntimeError, "fit", "inside of a tf.function"):
        tf.function(lambda: trainer.fit(X, Y, verbose=0), autograph=False)()
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with other.scope(), fails(RuntimeError, "scope of another strategy", "OneDeviceStrategy"):
        trainer.fit(X, Y, verbose=0)


def test_rows_without_a_batch():
    with fails(ValueError, "leading axis of rows", r"dataset.batch\(batch_size\)"):
        compiled().fit(tf.data.Dataset.from_tensor_slices((Y[:, 0], Y[:, 0])), verbose=0)


def test_fit_before_compile():
    with fails(ValueError, "compile", "fit"):
        kr.ReplicatedTrainer(build, devices=cpus(1)).fit(X, Y)


def test_step_that_returns_no_dict():
    trainer = compiled(train_step=lambda model, batch: 3.0)
    with fails(TypeError, "must return a dict", "3.0"):
        trainer.fit(X, Y, verbose=0)


@pytest.mark.parametrize("value", ["text", None, object()], ids=["string", "None", "object"])
def test_log_that_is_no_number(value):
    trainer = compiled(train_step=lambda model, batch: {"note": value})
    with fails(TypeError, "The log 'note' is no number", "kr.replica.Sum", "Received: note="):
        trainer.fit(X, Y, verbose=0)


def test_step_that_is_a_tf_function():
    with fails(ValueError, "train_step", "Remove the decorator"):
        kr.ReplicatedTrainer(build, devices=cpus(2), train_step=tf.function(lambda m, b: {}))


def test_several_models_without_a_step():
    trainer = kr.ReplicatedTrainer(lambda: {"a": build()}, devices=cpus(1))
    trainer.compile({"a": "sgd"})
    with fails(ValueError, "several models", "train_step"):
        trainer.fit(X, Y, verbose=0)


def test_collective_under_a_condition_of_a_tensor():
    def conditional():
        return tf.cond(
            tf.random.uniform(()) < 2.0, lambda: kr.replica.all_sum(1.0), lambda: tf.constant(0.0)
        )

    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    with fails(RuntimeError, "kr.replica", "condition", "tf.where"):
        trainer.run(conditional)


def test_collective_that_only_some_replicas_reach():
    def some():
        return kr.replica.all_sum(1.0) if kr.replica.replica_id() == 0 else tf.constant(0.0)

    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    with fails(RuntimeError, "kr.replica", "replica"):
        trainer.run(some)


def test_inputs_of_run_that_cannot_be_split():
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    with fails(ValueError, "trainer.run", "equally many", "3, 8 rows"):
        trainer.run(lambda x, y: x, X, Y[:3])
    with fails(ValueError, "a scalar", "kr.PerReplica"):
        trainer.run(lambda x: x, 3.0)


def test_accumulation_that_is_set_twice():
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1))
    with fails(ValueError, "gradient_accumulation_steps", "twice", "3", "2"):
        trainer.compile(
            keras.optimizers.SGD(gradient_accumulation_steps=2),
            "mse",
            gradient_accumulation_steps=3,
        )


@pytest.mark.parametrize("name", ["steps_per_execution", "gradient_accumulation_steps"])
def test_numbers_below_one(name):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1))
    with fails(ValueError, name, "at least 1", "0"):
        trainer.compile("sgd", "mse", **{name: 0})


def test_devices_beside_a_strategy_object():
    with fails(ValueError, "devices", "strategy"):
        kr.ReplicatedTrainer(build, devices=2, strategy=tf.distribute.get_strategy())


def test_staleness_without_parameter_servers():
    with fails(ValueError, "`max_staleness` is for parameter servers", "max_staleness=2"):
        kr.ReplicatedTrainer(build, max_staleness=2)


@pytest.mark.parametrize("value", [-1, 0.5, True])
def test_staleness_of_another_kind(value):
    with fails(ValueError, "`max_staleness` must be None or an int", f"max_staleness={value!r}"):
        kr.ReplicatedTrainer(build, max_staleness=value)


@pytest.mark.parametrize("options", [{"min_bytes": 0}, {"max_parts": 0}])
def test_tables_of_another_kind(options):
    with fails(ValueError, "must be an int of at least 1", f"{next(iter(options))}=0"):
        kr.Tables(**options)


def test_a_cluster_in_this_process_comes_first():
    tf.constant(0)
    with fails(RuntimeError, "simulate_cluster came too late", "workers=2, servers=1"):
        kr.simulate_cluster(workers=2, servers=1)
    with fails(ValueError, "`workers` must be an int", "workers=0"):
        kr.simulate_cluster(workers=0)
