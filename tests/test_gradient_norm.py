"""The gradient norm that callbacks ask for: that of one device, before clipping."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import column, compiled_trainer, cpus, ones, sequential, toy

# With weight 0 and rate 0 the gradient of a batch is -2 * mean(y): 4 rows, then 1 row.
Y = column(1, 1, 1, 5, 3)


def norms(trainer, epochs=1, batch_size=4, **names):
    throughput = kr.callbacks.Throughput(gradient_norm=True)
    history = trainer.fit(
        *(ones(5), Y),
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[throughput],
    ).history
    return {name: values for name, values in history.items() if name.startswith("gradient_norm")}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("clip", [{}, {"global_clipnorm": 1.0}])
def test_the_norm_is_that_of_one_device_before_clipping(replicas, clip):
    trainer = compiled_trainer(toy, replicas, optimizer=keras.optimizers.SGD(0.0, **clip))
    found = norms(trainer, epochs=2)
    assert list(found) == ["gradient_norm"]
    np.testing.assert_allclose(found["gradient_norm"], [5.0, 5.0], rtol=1e-6)


def test_accumulated_gradients_have_one_norm_for_each_update():
    trainer = compiled_trainer(
        toy, optimizer=keras.optimizers.SGD(0.0), gradient_accumulation_steps=2
    )
    found = norms(trainer, batch_size=2)["gradient_norm"]
    # Rows 1, 1 and 1, 5 make one update, row 3 the other.
    np.testing.assert_allclose(found, [(4.0 + 6.0) / 2], rtol=1e-6)


def test_a_scaled_loss_has_the_norm_of_an_unscaled_one():
    def build():
        return toy(dtype="mixed_float16")

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=256.0)
    trainer = compiled_trainer(build, optimizer=optimizer)
    np.testing.assert_allclose(norms(trainer)["gradient_norm"], [5.0], rtol=1e-3)


def test_several_optimizers_have_a_norm_each():
    def step(models, batch):
        x, y = batch
        for name, factor in (("a", 1.0), ("b", 2.0)):
            variables = models[name].trainable_variables
            with tf.GradientTape() as tape:
                loss = factor * kr.replica.mean(tf.square(y - models[name](x)))
            trainer.optimizers[name].apply(tape.gradient(loss, variables), variables)
        return {}

    trainer = kr.ReplicatedTrainer(
        lambda: {"a": toy(), "b": toy()}, devices=cpus(2), train_step=step
    )
    trainer.compile(optimizer={name: keras.optimizers.SGD(0.0) for name in "ab"})
    found = norms(trainer)
    np.testing.assert_allclose(found["gradient_norm_a"], [5.0], rtol=1e-6)
    np.testing.assert_allclose(found["gradient_norm_b"], [10.0], rtol=1e-6)


@pytest.mark.parametrize("ids, norm", [((0, 1), 5.0), ((2, 2), 7.0)])
def test_gradients_of_embeddings_count(ids, norm):
    def build():
        embedding = keras.layers.Embedding(4, 1, embeddings_initializer="zeros")
        return sequential((1,), embedding, keras.layers.Flatten(), dtype="int32")

    trainer = compiled_trainer(build, optimizer=keras.optimizers.SGD(0.0))
    throughput = kr.callbacks.Throughput(gradient_norm=True)
    history = trainer.fit(
        column(*ids), column(3, 4), batch_size=2, verbose=0, callbacks=[throughput]
    ).history
    np.testing.assert_allclose(history["gradient_norm"], [norm], rtol=1e-6)


def test_a_later_fit_may_ask_for_it():
    trainer = compiled_trainer(toy, optimizer=keras.optimizers.SGD(0.1))
    history = trainer.fit(ones(4), Y[:4], batch_size=4, verbose=0).history
    assert "gradient_norm" not in history
    (first,) = norms(trainer, batch_size=5)["gradient_norm"]
    weight = 0.1 * 2 * 2.0
    assert first == pytest.approx(2 * abs(weight - 2.2), rel=1e-5)
    assert int(trainer.model.optimizer.iterations) == 2
