"""Cases of what predict, the calls on one batch and the trained model give (contract, point 7)."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from tests.helpers import (
    RowCounter,
    arrays,
    assert_as_one_device,
    assert_close,
    column,
    compiled,
    compiled_trainer,
    cpus,
    first_weight,
    network,
    normal,
    on_one_device,
    ones,
    regression,
    sequential,
    toy,
)

one_and_two = pytest.mark.parametrize("replicas", [1, 2])


@one_and_two
def test_b65_train_on_batch(replicas):
    """tensorflow#39270: y = 0, 0, 2, 2: 4 rows are counted, loss 2, w = 0.2."""
    trainer = compiled_trainer(toy, replicas, metrics=[RowCounter()])
    logs = trainer.train_on_batch(ones(4), column(0, 0, 2, 2), return_dict=True)
    assert {name: float(value) for name, value in logs.items()} == {"loss": 2.0, "rows": 4.0}
    assert first_weight(trainer.model) == pytest.approx(0.2, rel=1e-6)


@one_and_two
def test_s06_test_on_batch(replicas):
    """Found by reading: 5 rows y = 0..4: 5 rows are counted, loss 6, w stays 0."""
    trainer = compiled_trainer(toy, replicas, metrics=[RowCounter()])
    logs = trainer.test_on_batch(ones(5), column(*range(5)), return_dict=True)
    assert {name: float(value) for name, value in logs.items()} == {"loss": 6.0, "rows": 5.0}
    assert first_weight(trainer.model) == 0.0


def test_s08_predict_on_batch():
    """Found by reading: 4 and 3 rows as one device."""
    alone = network()
    trainer = kr.ReplicatedTrainer(network, devices=cpus(2))
    trainer.model.set_weights(alone.get_weights())
    for rows in (4, 3):
        x = normal(rows, 3, seed=rows)
        assert_close(np.asarray(trainer.predict_on_batch(x)), alone.predict_on_batch(x))


@one_and_two
def test_predict_runs_many_steps_a_call(replicas):
    """A callback sees the last batch of each call, as under Keras."""
    seen = []

    class Notes(keras.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            seen.append(batch)

    trainer = compiled_trainer(network, replicas, steps_per_execution=4)
    outputs = trainer.predict(normal(22, 3), batch_size=2, callbacks=[Notes()], verbose=0)
    assert outputs.shape == (22, 1)
    assert seen == [3, 7, 10]


def test_c49_calls_with_changing_row_counts():
    """C49: train_on_batch with 4, 1, 5 and 2 rows on 3 replicas: lists and weights."""
    alone = network()
    trainer = kr.ReplicatedTrainer(network, devices=cpus(3))
    trainer.model.set_weights(alone.get_weights())
    returned = []
    for subject in (alone, trainer):
        subject.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
        logs = []
        for rows in (4, 1, 5, 2):
            # Before Keras 3.15 the metrics of one device go on from call to call.
            alone.reset_metrics()
            logs.append(subject.train_on_batch(*regression(rows, seed=rows)))
        returned.append(logs)
    assert [type(logs) for logs in returned[1]] == [list] * 4
    assert_close(returned[1], returned[0], what="returned")
    assert_close(trainer.model.get_weights(), alone.get_weights(), what="weights")


class NestedOutput(keras.Model):
    """A dict with a tensor, None and a pair; without a config and without Input."""

    def __init__(self):
        super().__init__()
        seeds = (keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2))
        self.logits, self.value = (layers.Dense(2, kernel_initializer=seed) for seed in seeds)

    def call(self, x):
        logits = self.logits(x)
        return {"logits": logits, "extra": None, "pair": (self.value(x), 2 * logits)}


def test_b66_nested_predictions():
    """transformers#11265: dict, None and tuple come back in the same structure, 5 rows each."""
    x = normal(5, 3)
    trainer = kr.ReplicatedTrainer(NestedOutput, devices=cpus(2))
    predictions = trainer.predict(x, batch_size=4, verbose=0)
    expected = NestedOutput()(x)
    assert predictions.keys() == expected.keys()
    assert predictions["extra"] is None
    assert isinstance(predictions["pair"], tuple)
    assert_close(predictions, expected)


def test_c48_two_outputs_on_three_replicas():
    """C48: {'logits', 'pair'} of 7 rows in batches of 5, in order."""

    def build():
        x = keras.Input((2,))
        pair = (layers.Dense(1)(x), layers.Dense(3)(x))
        return keras.Model(x, {"logits": layers.Dense(3)(x), "pair": pair})

    x = normal(7, 2)
    alone = build()
    trainer = kr.ReplicatedTrainer(build, devices=cpus(3))
    trainer.model.set_weights(alone.get_weights())
    predictions = trainer.predict(x, batch_size=5, verbose=0)
    assert_close(predictions, alone.predict(x, batch_size=5, verbose=0))


def test_b92_trained_model_is_a_keras_model(tmp_path):
    """tensorflow#40366: the trained model is called eagerly, saved and exported, all alike."""

    def build():
        return sequential(
            (3,),
            layers.Dense(4),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(1),
        )

    x, y = regression(10)
    trainer = compiled_trainer(build)
    trainer.fit(x, y, batch_size=4, verbose=0)
    expected = trainer.predict(x, verbose=0)
    assert_close(np.asarray(trainer.model(x)), expected, what="call")

    trainer.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(loaded.predict(x, verbose=0), expected, what="loaded")

    trainer.export(str(tmp_path / "exported"), verbose=False)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    assert_close(np.asarray(exported.serve(x)), expected, what="exported")


class Looks(keras.callbacks.Callback):
    """Predicts and evaluates 3 rows after every batch and epoch."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y
        self.rows = []
        self.models = []

    def look(self):
        self.models.append(self.model)
        self.rows.append(len(self.model.predict(self.x, verbose=0)))
        self.model.evaluate(self.x, self.y, verbose=0)

    def on_train_batch_end(self, batch, logs=None):
        self.look()

    def on_epoch_end(self, epoch, logs=None):
        self.look()


@one_and_two
def test_b93_callback_that_predicts_and_evaluates(replicas):
    """keras#21190: self.model is trainer.model; the run is that without the callback."""
    x, y = regression(10)
    options = compiled("SGD", 0.1, metrics=["mae"])
    weights = network().get_weights()
    expected = on_one_device(network, options, arrays(x, y), weights, batch_size=4, epochs=2)
    trainer = compiled_trainer(network, replicas, **options())
    trainer.model.set_weights(weights)
    looks = Looks(x[:3], y[:3])
    history = trainer.fit(
        x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[looks]
    ).history
    assert all(model is trainer.model for model in looks.models)
    assert looks.rows == [3] * 8
    assert_close(history, expected.history, what="history")
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")


@one_and_two
def test_c51_model_object_gets_the_trained_weights(replicas):
    """C51: the user's own model holds the weights of one device and predicts as the trainer."""
    model = network()
    data = arrays(*regression(10))
    expected = on_one_device(
        network, compiled("SGD", 0.1), data, model.get_weights(), batch_size=4, epochs=2
    )
    trainer = compiled_trainer(model, replicas)
    trainer.fit(**data(), batch_size=4, epochs=2, shuffle=False, verbose=0)
    assert_close(model.get_weights(), expected.weights, what="weights")
    x = data()["x"]
    assert_close(trainer.predict(x, verbose=0), model.predict(x, verbose=0), what="predict")


def test_c52_different_models_in_turn():
    """C52: Dense, Conv1D, Embedding, and Dense again, each as one device."""

    def convolution():
        return sequential((6, 2), layers.Conv1D(3, 3), layers.Flatten(), layers.Dense(1))

    def embedding():
        table = layers.Embedding(10, 4)
        return sequential((3,), table, layers.Flatten(), layers.Dense(1), dtype="int32")

    numbers = np.random.default_rng(0).integers(0, 10, (10, 3)).astype("int32")
    y = normal(10, 1)
    models = [
        (network, regression(10)),
        (convolution, (normal(10, 6, 2), y)),
        (embedding, (numbers, y)),
        (network, regression(10)),
    ]
    for build, data in models:
        assert_as_one_device(build, compiled("SGD", 0.1), arrays(*data), batch_size=4)


def leaky(x):
    return keras.ops.leaky_relu(x, 0.3)


class Bounded(keras.constraints.Constraint):
    def __call__(self, w):
        return keras.ops.clip(w, -0.4, 0.4)


class Ones(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None, **options):
        return 0.2 * keras.ops.ones(shape, dtype)


class Ridge(keras.regularizers.Regularizer):
    def __call__(self, w):
        return 0.1 * keras.ops.sum(w * w)

    def get_config(self):
        return {}


def custom_parts():
    """A functional model of functions and classes that nobody has registered."""
    x = keras.Input((3,))
    h = layers.Dense(4, activation=leaky, kernel_initializer=Ones(), kernel_constraint=Bounded())(x)
    h = layers.Dense(3, activation=lambda v: keras.ops.tanh(v) * 2, kernel_regularizer=Ridge())(h)
    inner = keras.Sequential([keras.Input((3,)), layers.Lambda(lambda v: v * 3.0)])
    h = inner(keras.ops.concatenate([h[:, :1], keras.ops.exp(-h[:, 1:])], axis=-1))
    h = layers.TimeDistributed(layers.Dense(2, activation=leaky))(h[:, None])
    return keras.Model(x, layers.Dense(1)(layers.Flatten()(h)))


def adapted():
    """A Normalization that has learned its statistics before the trainer is made."""
    normalization = layers.Normalization()
    normalization.adapt(3 * normal(20, 3) + 1)
    return sequential((3,), normalization, layers.Dense(1))


@pytest.mark.parametrize("build", [custom_parts, adapted])
def test_model_object_of_many_parts(build):
    """A model object is made anew with its own functions, classes and adapted layers."""
    weights = (model := build()).get_weights()
    expected = on_one_device(build, compiled("SGD", 0.1), arrays(*regression(7)), weights)
    trainer = kr.ReplicatedTrainer(model, devices=cpus(2))
    trainer.compile(**compiled("SGD", 0.1)())
    trainer.fit(*regression(7), shuffle=False, verbose=0)
    assert_close(model.get_weights(), expected.weights)
    assert_close(trainer.predict(regression(7)[0], verbose=0), expected.predictions)


def test_model_object_that_is_changed_between_fits():
    """Weights and frozen layers that the user sets on the object count in the next call."""
    runs = []
    for replicas in (None, 2):
        model = network()
        subject = model if replicas is None else kr.ReplicatedTrainer(model, devices=cpus(2))
        options = compiled("SGD", 0.1)
        subject.compile(**options())
        subject.fit(*regression(8), verbose=0)
        model.set_weights([0.5 * np.ones_like(weight) for weight in model.get_weights()])
        evaluation = subject.evaluate(*regression(8), verbose=0)
        model.layers[0].trainable = False
        subject.compile(**options())
        subject.fit(*regression(8), verbose=0)
        runs.append([evaluation, model.get_weights()])
    assert_close(runs[1], runs[0])


def test_methods_of_the_trained_model():
    """`trainer.model.evaluate` and `fit` are right on several replicas, too, before any fit."""

    def run(model):
        data = {"batch_size": 4, "verbose": 0}
        return [
            model.evaluate(*regression(7), **data),
            model.fit(*regression(7), shuffle=False, **data).history,
            model.predict(regression(7)[0], **data),
        ]

    alone = network()
    trainer = compiled_trainer(network, 3)
    trainer.model.set_weights(alone.get_weights())
    alone.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    assert_close(run(trainer.model), run(alone))
