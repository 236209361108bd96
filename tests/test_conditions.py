"""Updates under a condition equal one device; other collectives there are named errors."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import cpus


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.counter = keras.Variable(0, dtype="int32", trainable=False, name="counter")
    return model


def every_second_step(cond):
    """A step that updates every second time, by `tf.cond` or `keras.ops.cond`."""
    return functools.partial(conditional_step, cond)


def conditional_step(cond, model, batch):
    x, y = batch
    with tf.GradientTape() as tape:
        loss = kr.replica.mean(tf.square(y - model(x, training=True)))
    weights = model.trainable_variables
    gradients = tape.gradient(loss, weights)
    cond(
        model.counter % 2 == 0,
        lambda: model.optimizer.apply(gradients, weights) or tf.constant(0),
        lambda: tf.constant(0),
    )
    model.counter.assign(model.counter + 1)
    return {"loss": loss}


@pytest.mark.parametrize(
    "optimizer, cond",
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), keras.ops.cond),
        (
            lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True, clipnorm=0.5),
            tf.cond,
        ),
    ],
    ids=["keras.ops.cond", "tf.cond"],
)
def test_update_under_a_condition_of_a_tensor(optimizer, cond):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(21, 3)).astype("float32")
    y = generator.normal(size=(21, 1)).astype("float32")
    results = {}
    for replicas in (1, 2, 3):
        trainer = kr.ReplicatedTrainer(
            build, devices=cpus(replicas), train_step=every_second_step(cond)
        )
        trainer.compile(optimizer())
        history = trainer.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        results[replicas] = trainer.model.get_weights(), history["loss"]
        assert int(trainer.model.optimizer.iterations) == 6
    for replicas in (2, 3):
        np.testing.assert_allclose(results[replicas][1], results[1][1], rtol=1e-5)
        for actual, expected in zip(results[replicas][0], results[1][0]):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
