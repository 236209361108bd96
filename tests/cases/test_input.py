"""Cases of what `fit` takes: names, data sets, ragged and string rows, generators (point 1)."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import (
    arrays,
    assert_as_one_device,
    assert_close,
    compiled,
    compiled_trainer,
    first_weight,
    network,
    normal,
    ones,
    regression,
    run_script,
    sequential,
    toy,
)

sgd = compiled("SGD", 0.1)


def dataset(*data, batch_size=4):
    return tf.data.Dataset.from_tensor_slices(data).batch(batch_size)


def test_b31_inputs_by_name():
    """keras#20329: two inputs by name, 18 rows in batches of 8."""

    def build():
        inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
        hidden = layers.Concatenate()([layers.Dense(2)(inputs["a"]), inputs["b"]])
        return keras.Model(inputs, layers.Dense(1)(hidden))

    x = {"a": normal(18, 3), "b": normal(18, 2, seed=1)}
    assert_as_one_device(build, sgd, arrays(x, normal(18, 1, seed=2)), batch_size=8, epochs=2)


TALKATIVE = """
import logging

import tensorflow as tf

import keras_replicator as kr
from tests.helpers import ones, toy

tf.get_logger().setLevel(logging.DEBUG)
kr.simulate_devices(2)


def generate():
    for _ in range(6):
        yield ones(1)[0], ones(1)[0]


signature = (tf.TensorSpec((1,)), tf.TensorSpec((1,)))
generated = tf.data.Dataset.from_generator(generate, output_signature=signature).batch(4)
sliced = tf.data.Dataset.from_tensor_slices((ones(6), ones(6))).batch(4)
trainer = kr.ReplicatedTrainer(toy, devices=["CPU:0", "CPU:1"])
trainer.compile(optimizer="sgd", loss="mse")
for data in (generated, sliced):
    trainer.fit(data, epochs=2)
    trainer.evaluate(data)
trainer.train_on_batch(ones(4), ones(4))
print("done")
"""


def test_b45_no_word_about_sharding():
    """tensorflow#45157: nothing about auto-sharding, even at the most talkative log level."""
    finished = run_script(TALKATIVE, TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_MAX_VLOG_LEVEL="0")
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.rstrip().endswith("done")
    lines = finished.stdout.splitlines()
    assert [line for line in lines if re.search(r"auto.?shard|sharding", line, re.I)] == []


class CountsTraces(layers.Layer):
    """Counts in Python how often its call runs: once per tracing."""

    calls = 0

    def call(self, x):
        CountsTraces.calls += 1
        return x


class NotesTraces(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(CountsTraces.calls)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b63_no_new_trace_after_the_first_epoch(replicas):
    """tensorflow#49730: 4 epochs with a tail of 2 trace in the first only; evaluate likewise."""
    x, y = regression(22)
    trainer = compiled_trainer(lambda: sequential((3,), CountsTraces(), layers.Dense(1)), replicas)
    notes = NotesTraces()
    trainer.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=[notes])
    assert notes.seen == [notes.seen[0]] * 4
    evaluated = []
    for _ in range(2):
        trainer.evaluate(x, y, batch_size=4, verbose=0)
        evaluated.append(CountsTraces.calls)
    assert evaluated[0] == evaluated[1]


def assert_dataset_as_one_device(build, data, options=sgd, replicas=2, **fit):
    """Fit, evaluate and predict on a data set equal one device."""
    return assert_as_one_device(build, options, lambda: {"x": data}, replicas, **fit)


def test_b74_elements_with_none():
    """tensorflow#54900: a data set of (x, y, None) is one of (x, y)."""
    data = dataset(*regression(7)).map(lambda x, y: (x, y, None))
    assert_dataset_as_one_device(network, data, epochs=2)


def test_b76_lstm_with_tail():
    """tensorflow#40421: LSTM(6) - Dense(1) on 10 sequences of 7 steps, tail of 2."""
    assert_as_one_device(
        lambda: sequential((7, 3), layers.LSTM(6), layers.Dense(1)),
        sgd,
        arrays(normal(10, 7, 3), normal(10, 1, seed=1)),
        batch_size=4,
        epochs=2,
    )


class RaggedMean(layers.Layer):
    """Mean of the embeddings of each row of ragged ids."""

    def __init__(self):
        super().__init__()
        self.table = self.add_weight(shape=(8, 3), initializer="glorot_uniform", name="table")

    def call(self, ids):
        rows = tf.gather(tf.convert_to_tensor(self.table), ids)
        return tf.ensure_shape(tf.reduce_mean(rows, axis=1), (None, 3))


def test_b77_ragged_rows():
    """keras#15593: 7 ragged rows of 1 to 5 ids, tf.data in batches of 4; fit and evaluate."""
    numbers = np.random.default_rng(0)
    lengths = [5, 1, 3, 2, 4, 1, 5]
    ids = tf.ragged.constant([numbers.integers(0, 8, length).tolist() for length in lengths])

    def build():
        inputs = keras.Input((None,), dtype="int32", ragged=True)
        return keras.Model(inputs, layers.Dense(1)(RaggedMean()(inputs)))

    assert_dataset_as_one_device(build, dataset(ids, normal(7, 1)), epochs=2)


def test_b78_padded_batches_of_different_lengths():
    """tensorflow#28541: batches of 4 rows with 4, 5, 4 and 6 steps."""
    batches = [
        (normal(4, steps, 2, seed=seed), normal(4, 1, seed=10 + seed))
        for seed, steps in enumerate((4, 5, 4, 6))
    ]
    signature = (tf.TensorSpec((None, None, 2)), tf.TensorSpec((None, 1)))
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    assert_dataset_as_one_device(
        lambda: sequential((None, 2), layers.GlobalAveragePooling1D(), layers.Dense(1)),
        data,
        epochs=2,
    )


def test_b81_string_lookup_from_outside():
    """tensorflow#39991: a StringLookup that was adapted outside, and string rows."""
    words = tf.constant([["red"], ["blue"], ["grey"], ["green"], ["blue"], ["red"]])
    lookup = layers.StringLookup()
    lookup.adapt(words[:5])

    def build():
        inputs = keras.Input((1,), dtype="string")
        hidden = layers.Flatten()(layers.Embedding(6, 3)(lookup(inputs)))
        return keras.Model(inputs, layers.Dense(1)(hidden))

    assert_dataset_as_one_device(build, dataset(words, normal(6, 1)), epochs=2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b89_tf_config_of_a_single_chief(monkeypatch, replicas):
    """tensorflow#44093: TF_CONFIG with a chief only: the replicas of this machine; w = 0.2."""
    config = {"cluster": {"chief": ["127.0.0.1:12345"]}, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    trainer = compiled_trainer(toy, replicas)
    trainer.fit(ones(4), ones(4), batch_size=4, verbose=0)
    assert trainer.num_replicas == replicas
    assert first_weight(trainer.model) == pytest.approx(0.2, rel=1e-6)


def test_c47_generator_and_validation_arrays():
    """C47: three batches of a generator (4, 4, 3 rows), validation of 9 rows from arrays."""
    x, y = regression(11)
    unseen = regression(9, seed=5)

    def batches():
        for start in (0, 4, 8):
            yield x[start : start + 4], y[start : start + 4]

    def build():
        seed = keras.initializers.GlorotUniform(seed=1)
        return sequential((3,), layers.Dense(1, kernel_initializer=seed))

    alone = build()
    alone.compile(**sgd())
    trainer = compiled_trainer(build, **sgd())
    fits = [
        subject.fit(
            batches(),
            steps_per_epoch=3,
            epochs=1,
            validation_data=unseen,
            validation_batch_size=4,
            shuffle=False,
            verbose=0,
        ).history
        for subject in (alone, trainer)
    ]
    assert_close(fits[1], fits[0], what="history")
    assert_close(trainer.model.get_weights(), alone.get_weights(), what="weights")
