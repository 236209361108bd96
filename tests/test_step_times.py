"""Where the time of training goes: waiting for batches, and reducing over replicas."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import column, compiled_trainer, cpus, ones, toy

SLEEP, STEPS = 0.1, 6


class Seconds(keras.callbacks.Callback):
    """Notes what the trainer tells about the last epoch."""

    def on_epoch_end(self, epoch, logs=None):
        self.found = dict(self.params)


def slowly(value):
    """Gives a value some time later."""

    def wait(given):
        time.sleep(SLEEP)
        return given

    return tf.ensure_shape(tf.numpy_function(wait, [value], value.dtype), value.shape)


def batches(slow, counted, rows=8):
    data = tf.data.Dataset.from_tensors((ones(rows), ones(rows))).repeat(STEPS)
    if slow:
        data = data.map(lambda x, y: (slowly(x), y))
    return data if counted else data.filter(lambda x, y: True)


def times_of(trainer, data):
    """The seconds of a second epoch, which traces nothing."""
    seconds, throughput = Seconds(), kr.callbacks.Throughput()
    history = trainer.fit(data, epochs=2, verbose=0, callbacks=[throughput, seconds]).history
    return seconds.found, {name: values[-1] for name, values in history.items()}


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "unknown length"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_waiting_for_input(replicas, counted):
    trainer = compiled_trainer(toy, replicas)
    found, slow = times_of(trainer, batches(True, counted))
    # While a step runs, the next batch is being read: not all of that time is waited for.
    assert found["input_wait_seconds"] > STEPS * SLEEP / 2
    assert 0.3 < slow["input_wait_share"] <= 1
    found, fast = times_of(trainer, batches(False, counted))
    assert found["input_wait_seconds"] < STEPS * SLEEP / 3
    assert 0 < fast["input_wait_share"] < slow["input_wait_share"]


def test_waiting_for_input_without_compilation():
    trainer = compiled_trainer(toy, 1, run_eagerly=True)
    found, slow = times_of(trainer, batches(True, True))
    assert found["input_wait_seconds"] > STEPS * SLEEP / 2
    assert 0.3 < slow["input_wait_share"] <= 1


@pytest.mark.parametrize("accumulation", [1, 3])
def test_reducing_holds_the_wait_for_slower_replicas(accumulation):
    def step(model, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            if kr.replica.replica_id() == 1:
                loss *= slowly(tf.constant(1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return {"loss": loss}

    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2), train_step=step)
    trainer.compile(optimizer="sgd", gradient_accumulation_steps=accumulation)
    found, shares = times_of(trainer, batches(False, True))
    # Each update, one of two replicas waits for the other; with accumulation only the slow part of
    # the last step of a window lies between its gradients.
    assert found["reduce_seconds"] > (0.4 * STEPS * SLEEP if accumulation == 1 else 0)
    assert 0 < shares["reduce_share"] < 1


def test_one_replica_reduces_nothing():
    _, shares = times_of(compiled_trainer(toy, 1), batches(False, True))
    assert "input_wait_share" in shares and "reduce_share" not in shares


def test_numbers_do_not_depend_on_it():
    def fit(callbacks):
        trainer = compiled_trainer(toy, 2)
        trainer.fit(
            ones(7), column(*range(7)), batch_size=3, shuffle=False, verbose=0, callbacks=callbacks
        )
        return trainer.model.get_weights()

    for one, other in zip(fit([]), fit([kr.callbacks.Throughput()])):
        np.testing.assert_array_equal(one, other)
