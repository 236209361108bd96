"""What the tests share: small models and data, and the comparison of N replicas with one device.

The reference is always plain `keras.Model` on one device without a strategy. Importing this file
starts nothing of TensorFlow, so that scripts of several processes can use it, too.
"""

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_replicator as kr

REPOSITORY = Path(__file__).resolve().parents[1]


def cpus(count):
    """The names of the first `count` simulated CPUs."""
    return [f"CPU:{index}" for index in range(count)]


# Data


def column(*values):
    """Float32 rows with one feature each."""
    return np.array(values, "float32").reshape(-1, 1)


def ones(rows):
    """x = 1 for every row: the input of `toy`."""
    return np.ones((rows, 1), "float32")


def one_hot(rows):
    """Rows that touch one weight each, target 1: the weights show how often each row was used."""
    return np.eye(rows, dtype="float32"), ones(rows)


def normal(*shape, seed=0):
    """Float32 standard normal numbers that depend on `seed` and `shape` only."""
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def regression(rows, features=3, outputs=1, seed=0):
    """Inputs and targets of a noisy linear problem."""
    x = normal(rows, features, seed=seed)
    y = x @ normal(features, outputs, seed=seed + 1) + 0.3 * normal(rows, outputs, seed=seed + 2)
    return x, y


def classification(rows, classes=2, features=3, seed=0):
    """Inputs and integer labels; every class occurs."""
    labels = np.random.default_rng(seed).permutation(np.arange(rows) % classes)
    return normal(rows, features, seed=seed) + labels[:, None].astype("float32"), labels


def sequences(lengths, steps=None, features=2, seed=0):
    """Sequences padded with zeros to `steps`, and one target per step."""
    steps = steps or max(lengths)
    x = normal(len(lengths), steps, features, seed=seed)
    x[np.arange(steps) >= np.array(lengths)[:, None]] = 0
    return x, normal(len(lengths), steps, 1, seed=seed + 1)


# Models


def sequential(shape, *layers, dtype=None):
    """A built `keras.Sequential` for rows of `shape`."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def toy(initializer="zeros", **options):
    """y_pred = w * x, w starts at 0."""
    return sequential(
        (1,), keras.layers.Dense(1, use_bias=False, kernel_initializer=initializer, **options)
    )


def row_weights(rows):
    """One weight per one-hot row, all start at 0."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    return sequential((rows,), dense)


def network(features=3, outputs=1, units=4, activation=None, **options):
    """Dense - tanh - Dense; `options` are those of the first layer."""
    return sequential(
        (features,),
        keras.layers.Dense(units, activation="tanh", **options),
        keras.layers.Dense(outputs, activation=activation),
    )


def identity(*shape):
    """A model without weights that returns its input."""
    return sequential(shape or (1,), keras.layers.Activation("linear"))


def masked_network(steps=5, features=2):
    """Masking - Dense, one output per step."""
    return sequential((steps, features), keras.layers.Masking(), keras.layers.Dense(1))


def first_weight(model):
    """The weight of `toy` as a float."""
    return float(model.get_weights()[0].ravel()[0])


@keras.saving.register_keras_serializable("tests")
class RowCounter(keras.metrics.Metric):
    """Counts rows in an integer state."""

    def __init__(self, name="rows", dtype="int32", **options):
        super().__init__(name=name, dtype=dtype, **options)
        self.count = self.add_weight(shape=(), initializer="zeros", name="count", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.shape(y_pred)[0])

    def result(self):
        return keras.ops.cast(self.count, "float32")


class IntersectionOverUnion(keras.metrics.Metric):
    """Sum of intersections over sum of unions: a ratio of two summed states."""

    def __init__(self, name="iou", **options):
        super().__init__(name=name, **options)
        self.intersections = self.add_weight(initializer="zeros", name="intersections")
        self.unions = self.add_weight(initializer="zeros", name="unions")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = keras.ops.cast(y_true, "float32")
        both = keras.ops.sum(y_true * y_pred)
        self.intersections.assign_add(both)
        self.unions.assign_add(keras.ops.sum(y_true) + keras.ops.sum(y_pred) - both)

    def result(self):
        return self.intersections / self.unions


@keras.saving.register_keras_serializable("tests")
class NotesRows(keras.layers.Layer):
    """Passes its input on and notes how many rows each call saw, in `NotesRows.seen`."""

    seen = []

    def call(self, x):
        return noted(x, lambda rows: NotesRows.seen.append(len(rows)))


class NotesValues(keras.layers.Layer):
    """Passes its input on and notes its values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        return noted(x, self.seen.append)


def noted(x, note):
    """`x`, after `note(x as an array)` was called in Python each time it is computed."""

    def call(value):
        note(value)
        return np.int32(0)

    if isinstance(x, keras.KerasTensor):
        return x
    token = tf.numpy_function(call, [x], tf.int32)
    with tf.control_dependencies([token]):
        return tf.identity(x)


# Comparison


@dataclasses.dataclass
class Run:
    """What one training left behind."""

    weights: list
    history: dict
    evaluation: dict
    predictions: object
    optimizer: object

    @property
    def iterations(self):
        return int(self.optimizer.iterations)


def leaves(nest, path):
    """(path, leaf) of every leaf of dicts, lists and tuples, in order."""
    if isinstance(nest, dict):
        for key in sorted(nest):
            yield from leaves(nest[key], f"{path}/{key}")
    elif isinstance(nest, (list, tuple)):
        for index, item in enumerate(nest):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, nest


def assert_close(actual, expected, rtol=1e-5, what="value"):
    """Equal structure; numbers equal to `rtol` (or a tenth of it, of their tensor's largest)."""
    actual, expected = list(leaves(actual, what)), list(leaves(expected, what))
    assert [path for path, _ in actual] == [path for path, _ in expected]
    for (path, a), (_, e) in zip(actual, expected, strict=True):
        if e is None:
            assert a is None, f"{path}: {a}, expected None"
            continue
        a, e = np.asarray(a), np.asarray(e)
        assert a.shape == e.shape, f"{path}: shape {a.shape}, expected {e.shape}"
        largest = np.abs(e[np.isfinite(e)]).max(initial=1e-2)
        np.testing.assert_allclose(a, e, rtol=rtol, atol=0.1 * rtol * largest, err_msg=path)


def assert_same_run(actual, expected, rtol=1e-5):
    """Weights, history, evaluate and predict of two runs are equal."""
    assert_close(actual.weights, expected.weights, rtol, "weights")
    assert_close(actual.history, expected.history, rtol, "history")
    assert_close(actual.evaluation, expected.evaluation, rtol, "evaluate")
    assert_close(actual.predictions, expected.predictions, rtol, "predict")


def exercise(subject, compile_options, data, **fit):
    """Compiles, fits, evaluates and predicts with a Keras model or a trainer."""
    subject.compile(**compile_options)
    history = subject.fit(**data, shuffle=False, verbose=0, **fit).history
    arrays = {name: data[name] for name in ("x", "y", "sample_weight") if name in data}
    batch = {"batch_size": fit["batch_size"]} if "batch_size" in fit else {}
    evaluation = subject.evaluate(**arrays, **batch, verbose=0, return_dict=True)
    predictions = subject.predict(data["x"], **batch, verbose=0)
    model = getattr(subject, "model", subject)
    return Run(model.get_weights(), history, evaluation, predictions, model.optimizer)


def on_one_device(build, compile_options, data, weights=None, **fit):
    """A run of plain Keras without a strategy; arguments as in `on_replicas`."""
    with tf.device("CPU:0"), warnings.catch_warnings():
        # Keras warns at the end of every data set of unknown length.
        warnings.simplefilter("ignore")
        model = build()
        if weights is not None:
            model.set_weights(weights)
        return exercise(model, compile_options(), data(), **fit)


def on_replicas(replicas, build, compile_options, data, weights=None, trainer_options=None, **fit):
    """The same run on N replicas.

    `compile_options` and `data` are functions, so that every run gets objects of its own: the
    arguments of `compile`, and those of `fit` that hold data. `weights` are the initial ones.
    """
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas))
    if weights is not None:
        trainer.model.set_weights(weights)
    return exercise(trainer, compile_options(), data(), **fit)


def assert_as_one_device(
    build, compile_options, data, replicas=2, rtol=1e-5, compile_more=None, **fit
):
    """N replicas equal one device in weights, history, evaluate and predict; returns both runs.

    `compile_more` are arguments that plain Keras does not know.
    """
    weights = build().get_weights()
    expected = on_one_device(build, compile_options, data, weights, **fit)

    def options():
        return {**compile_options(), **(compile_more or {})}

    actual = on_replicas(replicas, build, options, data, weights, **fit)
    assert_same_run(actual, expected, rtol)
    return actual, expected


def compiled(optimizer, *arguments, loss="mse", metrics=None, more=None, **options):
    """A function that makes compile arguments: `compiled("SGD", 0.1, clipnorm=1, metrics=["mae"])`.

    Args:
        optimizer: name of a class in keras.optimizers; `arguments` and `options` are its own.
        loss: as in `compile`.
        metrics: as in `compile`, or a function that makes them.
        more: function that makes further arguments of `compile`.
    """

    def make():
        return {
            "optimizer": getattr(keras.optimizers, optimizer)(*arguments, **options),
            "loss": loss,
            "metrics": metrics() if callable(metrics) else metrics,
            **(more() if more else {}),
        }

    return make


def arrays(x, y=None, sample_weight=None, **more):
    """A function that gives the data arguments of `fit`."""
    given = {"x": x, "y": y, "sample_weight": sample_weight, **more}
    return lambda: {name: value for name, value in given.items() if value is not None}


def compiled_trainer(build, replicas=2, learning_rate=0.1, **options):
    """A trainer on simulated CPUs, compiled with SGD and squared error unless `options` differ."""
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas))
    trainer.compile(**{"optimizer": keras.optimizers.SGD(learning_rate), "loss": "mse", **options})
    return trainer


def fit_toy(y, batch_size, replicas=2, sample_weight=None, epochs=1, **options):
    """Trains `toy` on x = 1 and targets `y`, rows in order; returns (w, history).

    `options` are those of `compiled_trainer`.
    """
    trainer = compiled_trainer(options.pop("build", toy), replicas, **options)
    history = trainer.fit(
        ones(len(y)),
        column(*y),
        batch_size=batch_size,
        epochs=epochs,
        sample_weight=None if sample_weight is None else np.array(sample_weight, "float32"),
        shuffle=False,
        verbose=0,
    )
    return first_weight(trainer.model), history.history


# Steps that users write


def regression_step(model, batch):
    """A custom step for one device: squared error by `kr.replica.mean`, gradient, update."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with tf.GradientTape() as tape:
        per_row = keras.ops.sum(keras.ops.square(y - model(x, training=True)), axis=-1)
        loss = kr.replica.mean(per_row)
    variables = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return {"loss": loss}


def train_by_hand(updates, batches, epochs):
    """One device without any loop of Keras: the reference of custom steps.

    Args:
        updates: list of (function of a batch that gives a loss, variables, optimizer), applied in
            order for each batch.
        batches: list of batches.
        epochs: int.

    Returns:
        For each update, its losses averaged over the rows of each epoch.
    """
    history = [[] for _ in updates]
    rows = [len(keras.tree.flatten(batch)[0]) for batch in batches]
    for _ in range(epochs):
        losses = [[] for _ in updates]
        for batch in batches:
            for (loss, variables, optimizer), seen in zip(updates, losses, strict=True):
                with tf.GradientTape() as tape:
                    value = loss(*batch)
                optimizer.apply(tape.gradient(value, variables), variables)
                seen.append(float(value))
        for means, seen in zip(history, losses, strict=True):
            means.append(np.average(seen, weights=rows))
    return history


def batches_of(batch_size, *arrays):
    """Tuples of consecutive rows of `arrays`, as tensors."""
    return [
        tuple(tf.convert_to_tensor(array[start : start + batch_size]) for array in arrays)
        for start in range(0, len(arrays[0]), batch_size)
    ]


# Processes


def child_environment(**variables):
    """The environment of a process that imports the package and the tests of this checkout."""
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), inherited.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": path, "KERAS_BACKEND": "tensorflow", **variables}


def run_script(source, timeout=120, **environment):
    """Runs Python source in a process of its own; returns its `CompletedProcess`."""
    return run_python("-c", source, timeout=timeout, **environment)


def run_python(*arguments, timeout=120, **environment):
    """`python *arguments` in a process of its own, its two output streams in one."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=child_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
    )
