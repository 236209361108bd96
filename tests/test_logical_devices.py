"""kr.replica.logical_device: a layer on the second device of each replica; rows over replicas."""

import functools

import keras
import pytest
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from keras_replicator import compat
from tests.helpers import (
    arrays,
    assert_close,
    assert_same_run,
    compiled,
    cpus,
    exercise,
    on_one_device,
    regression,
    regression_step,
)

GROUPS = {
    1: [["CPU:0", "CPU:1"]],
    2: [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]],
}


def build(device=0):
    """Dense on the first device, Dense on another one."""
    inputs = keras.Input((3,))
    x = layers.Dense(4, "tanh", name="near")(inputs)
    with kr.replica.logical_device(device):
        x = layers.Dense(1, name="far")(x)
    return keras.Model(inputs, x)


split = functools.partial(build, 1)


def trainer(replicas, **options):
    return kr.ReplicatedTrainer(split, devices=GROUPS[replicas], **options)


@pytest.mark.parametrize("replicas", [1, 2])
def test_parity(replicas):
    options = compiled("Adam", 0.01, global_clipnorm=0.1, metrics=["mae"])
    data = arrays(*regression(21))
    weights = build().get_weights()
    expected = on_one_device(build, options, data, weights, batch_size=8, epochs=3)
    subject = trainer(replicas)
    subject.model.set_weights(weights)
    actual = exercise(subject, options(), data(), batch_size=8, epochs=3)
    assert_same_run(actual, expected)
    second = [group[1] for group in GROUPS[replicas]]
    far = subject.model.get_layer("far")
    assert compat.short_devices_of(far.kernel) == second
    assert compat.short_devices_of(subject.model.get_layer("near").kernel) == cpus(replicas)
    slots = {
        tuple(compat.short_devices_of(variable))
        for variable in subject.model.optimizer.variables
        if tuple(variable.shape) == (4, 1)
    }
    assert slots == {tuple(second)}


def test_operations_run_where_they_were_pinned():
    """Forward and backward, on both replicas."""
    places = {}

    def step(model, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            near = model.get_layer("near")(x)
            far = model.get_layer("far")(near)
            loss = tf.reduce_mean(tf.square(y - far))
        weights = [model.get_layer("far").kernel, model.get_layer("near").kernel]
        gradients = tape.gradient(loss, weights)
        found = [tensor.device[-5:] for tensor in (near, far, *gradients)]
        if not kr.replica.current().building:
            places[kr.replica.replica_id()] = found
        return {"loss": loss}

    subject = trainer(2, train_step=step)
    subject.compile("sgd")
    subject.fit(*regression(8), batch_size=8, verbose=0)
    assert places == {
        0: ["CPU:0", "CPU:2", "CPU:2", "CPU:0"],
        1: ["CPU:1", "CPU:3", "CPU:3", "CPU:1"],
    }


def test_a_context_inside_of_a_step():
    """Variables that a subclass makes under the context live there, too."""

    class Split(keras.Model):
        def __init__(self):
            super().__init__()
            self.near, self.far = layers.Dense(4, "tanh"), layers.Dense(1)

        def call(self, x):
            x = self.near(x)
            with kr.replica.logical_device(1):
                return self.far(x)

    subject = kr.ReplicatedTrainer(Split, devices=GROUPS[2], train_step=regression_step)
    subject.compile(keras.optimizers.SGD(0.1))
    subject.fit(*regression(16), batch_size=8, verbose=0)
    assert compat.short_devices_of(subject.model.far.kernel) == ["CPU:2", "CPU:3"]
    assert compat.short_devices_of(subject.model.near.kernel) == ["CPU:0", "CPU:1"]


def test_accumulated_gradients_lie_beside_their_variable():
    data = arrays(*regression(24))
    weights = build().get_weights()
    options = compiled("SGD", 0.1)
    expected = on_one_device(build, options, data, weights, batch_size=8)
    subject = trainer(2)
    subject.model.set_weights(weights)
    subject.compile(**options(), gradient_accumulation_steps=2)
    subject.fit(**data(), batch_size=4, shuffle=False, verbose=0)
    assert_close(subject.model.get_weights(), expected.weights)


def test_the_plan_names_the_groups():
    assert "CPU:0 + CPU:2, CPU:1 + CPU:3" in str(trainer(2).plan)


@pytest.mark.parametrize(
    "devices, words",
    [
        ([["CPU:0", "CPU:1"], ["CPU:2"]], ["all of the same size"]),
        ([["CPU:0", "CPU:1"], "CPU:2"], ["all of the same size"]),
        ([["CPU:0", "CPU:1"], ["CPU:1", "CPU:2"]], ["names a device twice"]),
    ],
)
def test_wrong_groups(devices, words):
    with pytest.raises(ValueError) as caught:
        kr.ReplicatedTrainer(build, devices=devices)
    for word in [*words, "Received: devices="]:
        assert word in str(caught.value)


def test_a_device_that_the_replica_does_not_have():
    with pytest.raises(ValueError, match=r"has 1 logical device\(s\).*Received: index=1"):
        kr.ReplicatedTrainer(split, devices=2)
