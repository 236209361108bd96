"""Cases of metrics: exactly their value on one device over all rows (contract, point 4)."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_replicator as kr
from tests.helpers import (
    IntersectionOverUnion,
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
    ones,
    regression,
    sequences,
    sequential,
    toy,
)

weightless = pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")


class Largest(keras.metrics.Metric):
    """The largest prediction: a state that is a maximum."""

    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.value = self.add_weight(initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        return self.value


def binary(rows):
    x, labels = classification(rows)
    return x, labels.reshape(-1, 1).astype("float32")


def evaluate_twice_and_fit(subject, *data, batch_size, epochs=1):
    """Two evaluations as dicts, and a history; two evaluations must not see each other."""
    first = subject.evaluate(*data, batch_size=batch_size, verbose=0, return_dict=True)
    second = subject.evaluate(*data, batch_size=batch_size, verbose=0, return_dict=True)
    fit = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return [first, second, subject.fit(*data, **fit).history]


def assert_evaluations_as_one_device(build, compile_options, *data, replicas=2, **fit):
    """`evaluate_twice_and_fit` on N replicas equals one device; returns its results."""
    alone = build()
    alone.compile(**compile_options())
    trainer = compiled_trainer(build, replicas, **compile_options())
    trainer.model.set_weights(alone.get_weights())
    expected = evaluate_twice_and_fit(alone, *data, **fit)
    actual = evaluate_twice_and_fit(trainer, *data, **fit)
    assert_close(actual, expected)
    return actual


@pytest.mark.parametrize("replicas", [1, 4])
def test_b14_accuracy_of_half_right_rows(replicas):
    """keras#19280: half of the rows are right: accuracy 0.5 in fit and evaluate."""

    def build():
        bias = keras.initializers.Constant([1.0, 0.0])
        dense = keras.layers.Dense(2, kernel_initializer="zeros", bias_initializer=bias)
        return sequential((3,), dense, keras.layers.Softmax())

    x, labels = classification(128)
    loss = "sparse_categorical_crossentropy"
    trainer = compiled_trainer(build, replicas, 0.0, loss=loss, metrics=["accuracy"])
    history = trainer.fit(x, labels, batch_size=32, epochs=2, verbose=0).history
    assert history["accuracy"] == [0.5, 0.5]
    evaluated = trainer.evaluate(x, labels, batch_size=32, verbose=0, return_dict=True)
    assert evaluated["accuracy"] == 0.5


@pytest.mark.parametrize("replicas", [1, 4])
def test_b15_integer_state(replicas):
    """keras#21054: a metric with an int32 state counts 120 rows each time."""
    trainer = compiled_trainer(toy, replicas, metrics=[RowCounter()])
    results = evaluate_twice_and_fit(trainer, ones(120), ones(120), batch_size=12)
    assert [np.ravel(result["rows"]).tolist() for result in results] == [[120], [120], [120]]


def test_b16_ratio_of_sums():
    """keras#20601: the ratio of two sums over 200 steps equals one device and is finite."""
    results = assert_evaluations_as_one_device(
        lambda: network(activation="sigmoid"),
        compiled("SGD", 0.01, metrics=lambda: [IntersectionOverUnion()]),
        *binary(800),
        batch_size=4,
    )
    assert all(np.isfinite(result["iou"]).all() for result in results)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b17_huge_losses(replicas):
    """keras#21467: 2000 steps of squared error 1e30 per row are logged as 1e30."""
    trainer = compiled_trainer(
        lambda: toy("ones"), replicas, learning_rate=0.0, steps_per_execution=50
    )
    x = 1e15 * ones(16000)
    history = trainer.fit(x, 0 * x, batch_size=8, shuffle=False, verbose=0).history
    # The float32 sum of one device is 1.3e-5 off by itself.
    assert history["loss"] == pytest.approx([1e30], rel=1e-4)


def test_b20_metrics_that_are_no_means():
    """tensorflow#48152: AUC, Precision, Recall, R2Score, F1Score, BinaryIoU equal one device."""

    def metrics():
        return [
            keras.metrics.AUC(num_thresholds=200, name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.Recall(name="recall"),
            keras.metrics.R2Score(name="r2"),
            keras.metrics.F1Score(threshold=0.5, name="f1"),
            keras.metrics.BinaryIoU(name="iou"),
        ]

    assert_evaluations_as_one_device(
        lambda: network(activation="sigmoid"),
        compiled("SGD", 0.1, loss="binary_crossentropy", metrics=metrics),
        *binary(37),
        batch_size=8,
        epochs=2,
    )


@weightless
@pytest.mark.parametrize("replicas", [1, 2])
def test_b20b_maximum(replicas):
    """addons#2629: the largest prediction is 3 on replica 0 and 5 on replica 1: 5."""
    trainer = compiled_trainer(identity, replicas, metrics=[Largest()])
    x = column(1, 3, 5, 2)
    results = evaluate_twice_and_fit(trainer, x, x, batch_size=4)
    assert [np.ravel(result["largest"]).tolist() for result in results] == [[5.0]] * 3


class UpdatesTracker(keras.callbacks.Callback):
    """Updates a metric of the model at the end of each epoch and notes what it reads then."""

    def __init__(self):
        super().__init__()
        self.read = []

    def on_epoch_end(self, epoch, logs=None):
        self.model.tracker.update_state(4.0)
        self.read.append(float(self.model.tracker.result()))


def test_b91_metric_updated_by_a_callback():
    """keras#16828: a Mean of the model that a callback updates with 4.0 has the result 4.0."""

    def build():
        model = toy()
        model.tracker = keras.metrics.Mean(name="tracker")
        return model

    trainer = compiled_trainer(build)
    updates = UpdatesTracker()
    trainer.fit(ones(4), ones(4), batch_size=4, epochs=2, verbose=0, callbacks=[updates])
    assert updates.read == [4.0, 4.0]
    assert float(trainer.model.tracker.result()) == 4.0


def test_c25_weighted_and_unweighted_metrics():
    """C25: sample weights 0..13: metrics and weighted_metrics equal one device."""
    x, y = regression(14)
    sample_weight = np.arange(14, dtype="float32")
    options = compiled(
        "SGD",
        0.01,
        metrics=lambda: ["mae", "mse"],
        more=lambda: {"weighted_metrics": ["mae", "mse"]},
    )
    alone = network()
    alone.compile(**options())
    trainer = compiled_trainer(network, **options())
    trainer.model.set_weights(alone.get_weights())

    def results(subject):
        evaluate = {"sample_weight": sample_weight, "batch_size": 4, "verbose": 0}
        found = [subject.evaluate(x, y, return_dict=True, **evaluate) for _ in range(2)]
        return [*found, subject.fit(x, y, shuffle=False, **evaluate).history]

    assert_close(results(trainer), expected := results(alone))
    assert len(expected[0]) == 5


def test_c26_masked_metrics():
    """C26: metrics of padded sequences count valid entries only."""

    def build():
        return sequential(
            (5, 2), keras.layers.Masking(), keras.layers.Dense(1, activation="sigmoid")
        )

    x, y = sequences([5, 1, 1, 5, 2, 1])
    assert_evaluations_as_one_device(
        build,
        compiled("SGD", 0.1, metrics=["mae", "binary_accuracy"]),
        x,
        (y > 0).astype("float32"),
        batch_size=4,
    )


def test_c27_rows_of_training_and_validation():
    """C27: 20 training and 7 validation rows are counted in every epoch on 3 replicas."""
    x, y = regression(20)
    unseen = regression(7, seed=5)
    actual, _ = assert_as_one_device(
        network,
        compiled("SGD", 0.1, metrics=lambda: [RowCounter(), "mae"]),
        arrays(x, y, validation_data=unseen),
        replicas=3,
        batch_size=6,
        epochs=3,
    )
    assert list(actual.history["rows"]) == [20, 20, 20]
    assert list(actual.history["val_rows"]) == [7, 7, 7]


def test_c30_evaluate_as_list_and_as_dict():
    """C30: loss with a penalty, tail of 2 on 4 replicas: both forms agree with one device."""

    def build():
        return network(kernel_regularizer=keras.regularizers.L2(0.1))

    x, y = regression(6)
    alone = build()
    alone.compile(loss="mse", metrics=["mae"])
    trainer = compiled_trainer(build, 4, metrics=["mae"])
    trainer.model.set_weights(alone.get_weights())
    listed = trainer.evaluate(x, y, batch_size=4, verbose=0)
    named = trainer.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    assert_close(listed, alone.evaluate(x, y, batch_size=4, verbose=0))
    assert dict(zip(["loss", "mae"], listed, strict=True)) == named


class Spread(keras.metrics.Metric):
    """Many states, a constructor with an argument of its own, and no `get_config`."""

    def __init__(self, power, name="spread"):
        super().__init__(name=name)
        self.power = power
        self.rows = self.add_weight(dtype="int64", initializer="zeros")
        self.low = self.add_weight(initializer=keras.initializers.Constant(1e9))
        self.high = self.add_weight(initializer=keras.initializers.Constant(-1e9))
        self.last = self.add_weight(shape=(2,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(ops.cast(ops.shape(y_pred)[0], "int64"))
        self.low.assign(ops.minimum(self.low, ops.min(y_pred)))
        self.high.assign(ops.maximum(self.high, ops.max(y_pred)))
        self.last.assign(ops.stack([ops.min(y_true), ops.max(y_true)]))

    def result(self):
        return {
            "rows": ops.cast(self.rows, "float32"),
            "range": (self.high - self.low) ** self.power,
            "last": ops.sum(self.last),
        }

    def reset_state(self):
        self.rows.assign(0)
        self.low.assign(1e9)
        self.high.assign(-1e9)
        self.last.assign([0.0, 0.0])


class ScaledError(keras.metrics.MeanMetricWrapper):
    """Wraps a function in a class that cannot be made from its config."""

    def __init__(self, name="scaled"):
        super().__init__(scaled_error, name=name, scale=3.0)


def scaled_error(y, p, scale=1.0):
    return scale * ops.abs(y - p)


def largest_prediction(y, p):
    """A function that returns a scalar: one value for each batch."""
    return ops.max(p)


def test_metrics_of_the_user_without_config():
    """tensorflow#37561: classes and functions as users write them; some replicas have no rows."""
    assert_evaluations_as_one_device(
        network,
        lambda: {
            "optimizer": keras.optimizers.SGD(0.1),
            "loss": "mse",
            "metrics": [
                Spread(2.0),
                ScaledError(),
                keras.metrics.MeanMetricWrapper(scaled_error, name="wrapped", scale=2.0),
                largest_prediction,
            ],
        },
        *regression(9),
        replicas=3,
        batch_size=7,
        epochs=2,
    )


def test_39268_function_of_the_whole_batch():
    """tensorflow#39268: kr.on_global_batch of a function that returns a scalar."""

    def ratio(y, p):
        return ops.max(y) / (1 + ops.max(ops.abs(p)))

    data, options = regression(9), {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}
    alone = network()
    alone.compile(**options, metrics=[ratio])
    trainer = compiled_trainer(network, 3, learning_rate=0.0, metrics=[kr.on_global_batch(ratio)])
    trainer.model.set_weights(alone.get_weights())
    expected = evaluate_twice_and_fit(alone, *data, batch_size=7)
    assert_close(evaluate_twice_and_fit(trainer, *data, batch_size=7), expected)


def test_metric_object_of_the_user_has_the_result():
    """Whoever holds the metric that was passed reads the value over all rows from it."""
    metric, seen = keras.metrics.MeanAbsoluteError(name="mae"), []
    trainer = compiled_trainer(network, 2, metrics=[metric])
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append((float(metric.result()), logs["mae"]))
    )
    trainer.fit(*regression(7), batch_size=4, verbose=0, callbacks=[note])
    assert seen[0][0] == pytest.approx(seen[0][1], rel=1e-6)
    assert seen[0][0] > 0
