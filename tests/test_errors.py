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


def test_shapes_that_do_not_fit():
    with fails(ValueError, "expected shape=|incompatible", "4"):
        compiled().fit(np.ones((8, 4), "float32"), Y, verbose=0)


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


@pytest.mark.parametrize("name", ["parameter_server", "mesh"])
def test_strategies_that_are_not_built(name):
    with fails(ValueError, name, "not available in this version", "mirrored"):
        kr.ReplicatedTrainer(build, strategy=name)
