"""Long work says what it is doing; short work says nothing."""

import re
import time

import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from keras_replicator import long_work
from tests.helpers import column, compiled_trainer, cpus, ones, toy


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(long_work, "_PATIENCE", 0.2)


def test_short_work_says_nothing(capsys, impatient):
    with long_work.announced("Reading"):
        pass
    time.sleep(0.3)
    assert capsys.readouterr().err == ""


def test_long_work_says_so_once(capsys, impatient):
    with long_work.announced("Reading"):
        time.sleep(0.4)
    said = capsys.readouterr().err
    assert re.fullmatch(r"Reading goes on for more than 0\.2 s …\nReading took \d s\.\n", said)


def test_other_workers_say_nothing(capsys, impatient):
    with long_work.announced("Reading", is_chief=False):
        time.sleep(0.4)
    assert capsys.readouterr().err == ""


def slow_to_trace(model, batch):
    """A step whose tracing takes long."""
    time.sleep(0.3)
    x, y = batch
    return {"loss": tf.reduce_mean((model(x) - y) ** 2)}


def test_tracing(capsys, impatient):
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2), test_step=slow_to_trace)
    trainer.compile(optimizer="sgd")
    trainer.evaluate(ones(4), ones(4), verbose=0)
    said = capsys.readouterr().err
    assert "Building the test step goes on for more than 0.2 s" in said
    assert "Tracing and compiling the step of 2 replicas took" in said
    trainer.evaluate(ones(4), ones(4), verbose=0)
    assert capsys.readouterr().err == ""


def test_skipping_data(capsys, impatient, tmp_path):
    def data():
        def slowly(x):
            time.sleep(0.05)
            return x

        rows = tf.data.Dataset.from_tensor_slices((ones(12), column(*range(12)))).batch(1)
        # Python in the pipeline: its place cannot be saved.
        return rows.map(
            lambda x, y: (tf.ensure_shape(tf.numpy_function(slowly, [x], x.dtype), x.shape), y)
        )

    class Stop(kr.callbacks.Checkpoint):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if batch == 9:
                raise KeyboardInterrupt

    def fit(callback, **options):
        trainer = compiled_trainer(toy, 2)
        trainer.fit(data(), epochs=1, verbose=0, callbacks=[callback], **options)
        return trainer

    with pytest.raises(KeyboardInterrupt):
        fit(Stop(tmp_path, every="5 steps"))
    capsys.readouterr()
    resumed = fit(kr.callbacks.Checkpoint(tmp_path, every="5 steps"), resume="auto")
    said = capsys.readouterr().err
    assert "Reading up to the place where the run stopped goes on for more than 0.2 s" in said
    unbroken = compiled_trainer(toy, 2)
    unbroken.fit(data(), epochs=1, verbose=0)
    for one, other in zip(resumed.model.get_weights(), unbroken.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
