"""Cases of rows: every one is used exactly once, whatever the split (contract, points 1 and 7)."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.helpers import (
    NotesRows,
    RowCounter,
    arrays,
    assert_as_one_device,
    assert_close,
    classification,
    column,
    compiled,
    compiled_trainer,
    identity,
    network,
    on_one_device,
    on_replicas,
    one_hot,
    ones,
    regression,
    row_weights,
    sequential,
    toy,
)

one_and_two = pytest.mark.parametrize("replicas", [1, 2])


def row_trainer(rows, replicas):
    """One weight per one-hot row, sum of squares: a row that is used once moves it to 0.2."""
    return compiled_trainer(
        lambda: row_weights(rows), replicas, loss=keras.losses.MeanSquaredError(reduction="sum")
    )


def assert_row_weights(trainer, value):
    weights = trainer.model.get_weights()[0]
    assert_close(weights, np.full(weights.shape, value))


@pytest.mark.parametrize("rows, batch_size", [(3, 1), (9, 3)])
@one_and_two
def test_b04_odd_batches(replicas, rows, batch_size):
    """keras#19246: batches that N does not divide: every row is used once, every weight is 0.2."""
    trainer = row_trainer(rows, replicas)
    data = tf.data.Dataset.from_tensor_slices(one_hot(rows)).batch(batch_size)
    trainer.fit(data, verbose=0)
    assert_row_weights(trainer, 0.2)


def test_c01_tail_on_three_replicas():
    """C01: 10 one-hot rows in batches of 4: all ten weights are 0.2."""
    trainer = row_trainer(10, replicas=3)
    trainer.fit(*one_hot(10), batch_size=4, shuffle=False, verbose=0)
    assert_row_weights(trainer, 0.2)


class UnevenBatches(keras.utils.PyDataset):
    """7 one-hot rows in batches of 3, 3 and 1."""

    def __init__(self):
        super().__init__()
        self.x, self.y = one_hot(7)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(3 * index, 3 * index + 3)
        return self.x[rows], self.y[rows]


@one_and_two
def test_c03_py_dataset(replicas):
    """C03: a PyDataset, two epochs: all weights are 0.2 + 0.2 * 0.8."""
    trainer = row_trainer(7, replicas)
    trainer.fit(UnevenBatches(), epochs=2, shuffle=False, verbose=0)
    assert_row_weights(trainer, 0.36)


@one_and_two
def test_s05_generator(replicas):
    """keras#19246: a Python generator of batches of 4, 4 and 3 rows: all eleven weights are 0.2."""
    x, y = one_hot(11)

    def batches():
        for start in (0, 4, 8):
            yield x[start : start + 4], y[start : start + 4]

    trainer = row_trainer(11, replicas)
    trainer.fit(batches(), epochs=1, verbose=0)
    assert_row_weights(trainer, 0.2)


def test_b22_confusion_counters():
    """tensorflow#25284: the four counters of 1000 rows add up to 1000 and equal one device."""

    def metrics():
        return [
            keras.metrics.TruePositives(name="tp"),
            keras.metrics.TrueNegatives(name="tn"),
            keras.metrics.FalsePositives(name="fp"),
            keras.metrics.FalseNegatives(name="fn"),
        ]

    def build():
        return network(activation="sigmoid")

    x, labels = classification(1000)
    y = labels.reshape(-1, 1).astype("float32")
    alone = build()
    alone.compile(loss="binary_crossentropy", metrics=metrics())
    trainer = compiled_trainer(build, loss="binary_crossentropy", metrics=metrics())
    trainer.model.set_weights(alone.get_weights())
    quiet = {"batch_size": 16, "verbose": 0, "return_dict": True}
    counted = trainer.evaluate(x, y, **quiet)
    assert_close(counted, alone.evaluate(x, y, **quiet))
    assert sum(counted[name] for name in ("tp", "tn", "fp", "fn")) == 1000


class NotesRowCounts(keras.callbacks.Callback):
    """Notes the metric `rows` of every epoch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(float(logs["rows"]))


def test_b33_data_set_distributed_by_the_strategy():
    """keras#14907: 8 rows per pipeline, per-replica batch 2: both epochs and evaluate see all 8."""
    trainer = compiled_trainer(toy, metrics=[RowCounter()])

    def pipeline(context):
        return tf.data.Dataset.from_tensor_slices((column(*range(8)), ones(8))).batch(2)

    def distributed():
        return trainer.strategy.distribute_datasets_from_function(pipeline)

    notes = NotesRowCounts()
    trainer.fit(distributed(), epochs=2, verbose=0, callbacks=[notes])
    assert notes.seen == [8, 8]
    assert trainer.evaluate(distributed(), verbose=0, return_dict=True)["rows"] == 8


class CountsSteps(keras.callbacks.Callback):
    """Counts training and validation batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append([0, 0])

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[-1][0] += 1

    def on_test_batch_end(self, batch, logs=None):
        self.epochs[-1][1] += 1


@one_and_two
@pytest.mark.parametrize("repeat", [False, True], ids=["finite", "repeated"])
def test_b41_steps_of_every_epoch(replicas, repeat, capfd):
    """tensorflow#30636: 16 training and 4 validation steps in each epoch, nothing runs out."""
    data = tf.data.Dataset.from_tensor_slices(regression(1000)).batch(64)
    unseen = tf.data.Dataset.from_tensor_slices(regression(100, seed=5)).batch(32)
    steps = {"steps_per_epoch": 16} if repeat else {}
    trainer = compiled_trainer(network, replicas)
    counts = CountsSteps()
    trainer.fit(
        data.repeat() if repeat else data,
        epochs=2,
        validation_data=unseen,
        verbose=0,
        callbacks=[counts],
        **steps,
    )
    assert counts.epochs == [[16, 4], [16, 4]]
    printed = "".join(capfd.readouterr()).lower()
    assert "ran out of data" not in printed
    assert "end of sequence" not in printed


@one_and_two
def test_b42_filtered_data_set(replicas):
    """tensorflow#62963: a filter that keeps 15 of 30 rows: 15 are counted both times."""
    numbers = column(*range(30))
    data = tf.data.Dataset.from_tensor_slices((numbers, numbers))
    data = data.filter(lambda x, y: tf.equal(x[0] % 2, 0)).batch(4)
    trainer = compiled_trainer(toy, replicas, metrics=[RowCounter()])
    first, second = (trainer.evaluate(data, verbose=0, return_dict=True) for _ in range(2))
    assert first["rows"] == second["rows"] == 15
    assert first["loss"] == second["loss"]


class ReadsFirstRow(layers.Layer):
    """Its input; fails where there is no first row."""

    def call(self, x):
        return x + 0.0 * x[0]


def test_b47_empty_replicas_are_not_run():
    """tensorflow#58809: a tail of one row on 4 replicas, under a model that reads x[0]."""
    assert_as_one_device(
        lambda: sequential((3,), ReadsFirstRow(), layers.Dense(1)),
        compiled("SGD", 0.1),
        arrays(*regression(33)),
        replicas=4,
        batch_size=16,
    )


@one_and_two
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_b67_predict_returns_the_rows_in_order(replicas, steps_per_execution):
    """tensorflow#30843: predict of n rows returns exactly these, in order, for every n."""
    trainer = compiled_trainer(identity, replicas, steps_per_execution=steps_per_execution)
    for rows in (1, 3, 5, 17, 33, 1000):
        x = column(*range(rows))
        predicted = trainer.predict(x, batch_size=8, verbose=0)
        np.testing.assert_array_equal(predicted, x)


def test_b84_default_batch_size():
    """tensorflow#32077: 70 rows of 4 features on 3 replicas, batch size left out (32)."""
    data = arrays(*regression(70, 4))
    weights = network(4).get_weights()
    expected = on_one_device(lambda: network(4), compiled("SGD", 0.1), data, weights, epochs=2)
    actual = on_replicas(3, lambda: network(4), compiled("SGD", 0.1), data, weights, epochs=2)
    assert actual.iterations == 6
    assert_close(actual.weights, expected.weights, what="weights")
    assert_close(actual.history, expected.history, what="history")


@one_and_two
@pytest.mark.parametrize("source", ["numpy", "tf.data"])
def test_b85_batch_size_is_global(replicas, source):
    """tensorflow#25620: batches of 10 rows: 10 steps, and every call sees 10 / N rows."""
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    trainer = compiled_trainer(lambda: sequential((1,), NotesRows(), dense), replicas)
    NotesRows.seen.clear()
    if source == "numpy":
        trainer.fit(ones(100), ones(100), batch_size=10, verbose=0)
    else:
        data = tf.data.Dataset.from_tensor_slices((ones(100), ones(100))).batch(10)
        trainer.fit(data, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 10
    assert NotesRows.seen == [10 // replicas] * (10 * replicas)


def test_c04_more_replicas_than_rows():
    """C04: batches of 2 rows on 4 replicas, tail of 1."""
    assert_as_one_device(
        network,
        compiled("SGD", 0.1),
        arrays(*regression(11)),
        replicas=4,
        batch_size=2,
        epochs=2,
    )


def test_c06_validation_split():
    """C06: 37 rows, validation_split 0.3."""
    actual, _ = assert_as_one_device(
        network,
        compiled("SGD", 0.1, metrics=["mae"]),
        arrays(*regression(37)),
        batch_size=8,
        epochs=2,
        validation_split=0.3,
    )
    assert set(actual.history) == {"loss", "mae", "val_loss", "val_mae"}


def test_c08_steps_per_execution_with_tail():
    """C08: 7 steps, 3 per execution, tail of 3 rows: as one step at a time; iterations 14."""
    data = arrays(*regression(27))
    options = compiled("SGD", 0.1)
    weights = network().get_weights()
    fit = {"batch_size": 4, "epochs": 2}
    expected = on_one_device(network, options, data, weights, **fit)
    actual = on_replicas(
        2, network, lambda: {**options(), "steps_per_execution": 3}, data, weights, **fit
    )
    assert actual.iterations == 14
    assert_close(actual.weights, expected.weights, what="weights")
    assert_close(actual.history, expected.history, what="history")


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("source", ["arrays", "tf.data"])
@pytest.mark.filterwarnings("ignore:The data ended")
def test_steps_per_epoch_as_keras_counts_them(source, steps):
    """3 batches: epochs of 2 and 1 steps, or of 3 where 5 are promised; the same rows as Keras."""
    x, y = regression(11)
    data = {"x": x, "y": y}
    if source == "tf.data":
        data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(4)}
    fit = {"steps_per_epoch": steps, "epochs": 4, "shuffle": False, "verbose": 0}
    if source == "arrays":
        fit["batch_size"] = 4
    alone = network()
    trainer = compiled_trainer(network, 2)
    trainer.model.set_weights(alone.get_weights())
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = alone.fit(**data, **fit).history
    assert_close(trainer.fit(**data, **fit).history, expected)
    assert_close(trainer.model.get_weights(), alone.get_weights())


def test_25254_validation_starts_anew_after_each_epoch():
    """tensorflow#25254: validation_steps below the size of the data: the same rows each time."""
    x = column(*range(8))
    validation = tf.data.Dataset.from_tensor_slices((x, x)).batch(2)
    trainer = compiled_trainer(toy, learning_rate=0.0)
    history = trainer.fit(
        x, x, epochs=3, validation_data=validation, validation_steps=2, verbose=0
    ).history
    assert history["val_loss"] == pytest.approx([(0 + 1 + 4 + 9) / 4] * 3)


def test_second_fit_reads_from_the_first_batch():
    """With steps_per_epoch each fit begins with the first batch, as in Keras."""
    trainer = compiled_trainer(lambda: row_weights(6))
    for _ in range(2):
        trainer.fit(*one_hot(6), batch_size=2, steps_per_epoch=1, shuffle=False, verbose=0)
    assert np.flatnonzero(trainer.model.get_weights()[0]).tolist() == [0, 1]
