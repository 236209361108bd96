"""What a trainer on a mesh does beside the numbers of the built-in step."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from keras_replicator import compat
from keras_replicator.engines import lowering
from tests.helpers import (
    arrays,
    assert_close,
    assert_same_run,
    batches_of,
    classification,
    compiled,
    cpus,
    exercise,
    network,
    normal,
    on_one_device,
    regression,
    regression_step,
    sequential,
    train_by_hand,
)
from tests.mesh.subjects import SUBJECTS, adam, mlp, several_steps_a_call, sizes, trainer


def on_mesh(build, compile_options, data, mesh="2x2", weights=None, variables="auto", **fit):
    """A run on a mesh; arguments as those of `on_one_device`."""
    subject = kr.ReplicatedTrainer(build, layout=kr.Layout(sizes(mesh), variables))
    if weights is not None:
        subject.model.set_weights(weights)
    return exercise(subject, compile_options(), data(), **fit)


def assert_mesh_as_one_device(build, compile_options, data, mesh="2x2", more=None, **fit):
    """A mesh equals one device; `more` are arguments of compile that plain Keras does not know."""
    weights = build().get_weights()
    expected = on_one_device(build, compile_options, data, weights, **fit)
    actual = on_mesh(
        build, lambda: {**compile_options(), **(more or {})}, data, mesh, weights, **fit
    )
    assert_same_run(actual, expected)
    return actual, expected


# Layouts


def test_keras_layout_map():
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{i}" for i in range(4)])
    given = keras.distribution.LayoutMap(mesh)
    given[".*dense/kernel"] = (None, "model")
    subject = kr.ReplicatedTrainer(mlp, layout=given)
    assert subject.plan.strategy == "mesh"
    assert subject.plan.devices == tuple(cpus(4))
    shapes = [part.shape for part in compat.raw_variable(subject.model.weights[0]).shards()]
    assert shapes == [(6, 8)] * 4


@pytest.mark.slow
def test_a_mesh_without_a_layout_splits_weights_over_all_devices():
    subject = kr.ReplicatedTrainer(mlp, strategy="mesh", devices=2)
    assert "over 2 devices: batch=1 x model=2" in str(subject.plan)
    assert "sequential/dense/kernel (None, 'model')" in str(subject.plan)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"layout": kr.Layout({"model": 3}, "auto"), "devices": 4}, ["3 device(s)", "there are 4"]),
        ({"layout": kr.Layout({"model": 9}, "auto")}, ["9 device(s)", "there are 8"]),
        ({"layout": kr.Layout({"model": 2}), "strategy": "mirrored"}, ["`layout` is for a mesh"]),
        (
            {"layout": kr.Layout({"model": 2}, {"dense/kernle": (None, "model")})},
            ["'dense/kernle' matches no variable", "sequential/dense/kernel (6, 16)"],
        ),
        (
            {"layout": kr.Layout({"model": 4}, {".*/dense/kernel": ("model", None)})},
            ["'sequential/dense/kernel' of shape (6, 16)", "6 is not divisible by 4"],
        ),
        ({"layout": kr.Layout({"batch": 2}, "auto")}, ["splits weights over the axis 'model'"]),
    ],
)
def test_layouts_that_do_not_fit(options, words):
    with pytest.raises(ValueError) as caught:
        kr.ReplicatedTrainer(mlp, **options)
    for word in [*words, "Received: "]:
        assert word in str(caught.value)


def test_xla_is_refused():
    subject = trainer("mlp", "2x2")
    with pytest.raises(
        ValueError, match="mesh.*Leave out `jit_compile`. Received: jit_compile=True"
    ):
        subject.compile("sgd", "mse", jit_compile=True)


# Memory


def bytes_per_device(subject):
    """[(weights, slots) of each device], summed over the local shards."""
    counts = []
    for variables in (subject.model.weights, subject.model.optimizer.variables):
        raw = [compat.raw_variable(variable) for variable in variables]
        parts = [[part.numpy().nbytes for part in variable.shards()] for variable in raw]
        counts.append(np.sum(parts, axis=0))
    return np.stack(counts, axis=1)


def test_memory_is_what_the_plan_announces():
    """A quarter of what is split, and all of the rest, on each of four devices."""

    def build():
        return sequential((64,), layers.Dense(256, "relu"), layers.Dense(64), layers.Dense(32))

    rules = {
        ".*/dense/kernel": (None, "model"),
        ".*/dense/bias": ("model",),
        ".*/dense_1/kernel": ("model", None),
    }
    subject = kr.ReplicatedTrainer(build, layout=kr.Layout({"batch": 1, "model": 4}, rules))
    assert dict(subject.plan.memory)["slots"] is None
    subject.compile("adam", "mse")
    announced = dict(subject.plan.memory)
    subject.fit(normal(8, 64), normal(8, 32), batch_size=8, verbose=0)
    found = bytes_per_device(subject)
    split, whole = (64 * 256 + 256 + 256 * 64) * 4, (64 + 64 * 32 + 32) * 4
    assert found.shape == (4, 2)
    np.testing.assert_array_equal(found[:, 0], split / 4 + whole)
    # Adam has two slots for each weight; its counter and learning rate are not counted.
    np.testing.assert_allclose(found[:, 1], 2 * (split / 4 + whole), atol=16)
    np.testing.assert_array_equal(found[:, 0], announced["weights"])
    np.testing.assert_allclose(found[:, 1], announced["slots"], atol=16)
    assert announced["gradients"] == announced["weights"]


# Optimizers, precision, accumulation


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            compiled("SGD", 0.1, momentum=0.9, clipnorm=0.1, nesterov=True),
            id="SGD",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            compiled("Adam", 0.01, amsgrad=True, use_ema=True, ema_overwrite_frequency=3),
            id="Adam",
        ),
    ],
)
def test_optimizers(options):
    data = arrays(*regression(21))
    assert_mesh_as_one_device(network, options, data, batch_size=8, epochs=3)


def test_accumulation():
    """Two steps of 8 rows are one of 16; the tail is an update of its own."""
    data = arrays(*regression(40))
    weights = network().get_weights()
    options = compiled("Adam", 0.01, global_clipnorm=0.1)
    expected = on_one_device(network, options, data, weights, batch_size=16, epochs=2)
    actual = on_mesh(
        network,
        lambda: {**options(), "gradient_accumulation_steps": 2},
        data,
        weights=weights,
        batch_size=8,
        epochs=2,
    )
    assert_close(actual.weights, expected.weights)
    assert actual.iterations == expected.iterations == 6


@pytest.mark.slow
def test_mixed_precision():
    """The loss scale halves alike, and weights are close to those of one device in float16."""
    keras.config.set_dtype_policy("mixed_float16")
    data = arrays(*regression(32))
    weights = network().get_weights()
    options = compiled("SGD", 0.1)
    expected = on_one_device(network, options, data, weights, batch_size=8)
    actual = on_mesh(network, options, data, weights=weights, batch_size=8)
    assert float(actual.optimizer.dynamic_scale) == float(expected.optimizer.dynamic_scale)
    assert_close(actual.weights, expected.weights, rtol=2e-2)


# Losses and metrics


@pytest.mark.slow
def test_sample_weights_masks_and_penalties():
    def build():
        return sequential(
            (5, 2),
            layers.Masking(),
            layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.1)),
            layers.Dense(1),
        )

    x = normal(12, 5, 2)
    x[::2, 3:] = 0
    weights = np.linspace(0.5, 2, 60).astype("float32").reshape(12, 5)
    data = arrays(x, normal(12, 5, 1, seed=1), weights)
    assert_mesh_as_one_device(build, compiled("SGD", 0.1), data, batch_size=8, epochs=2)


def test_metrics():
    def metrics():
        return [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.RootMeanSquaredError(name="rmse"),
        ]

    x, y = classification(22, features=6)
    data = arrays(x, y.astype("float32")[:, None])
    options = compiled("SGD", 0.1, loss="binary_crossentropy", metrics=metrics)
    build = functools.partial(network, 6, activation="sigmoid", units=8)
    assert_mesh_as_one_device(build, options, data, batch_size=8, epochs=2)


# Steps of the user's own


def test_custom_step():
    x, y = regression(21)
    weights = network().get_weights()
    reference = network()
    reference.set_weights(weights)

    def loss(x, y):
        return tf.reduce_mean(tf.reduce_sum(tf.square(y - reference(x, training=True)), axis=-1))

    updates = [(loss, reference.trainable_variables, keras.optimizers.Adam(0.01))]
    (losses,) = train_by_hand(updates, batches_of(8, x, y), epochs=2)
    subject = kr.ReplicatedTrainer(
        network, layout=kr.Layout(sizes("2x2"), "auto"), train_step=regression_step
    )
    subject.model.set_weights(weights)
    subject.compile(keras.optimizers.Adam(0.01))
    history = subject.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    assert_close(history, {"loss": losses})
    assert_close(subject.model.get_weights(), reference.get_weights())


@pytest.mark.slow
def test_several_optimizers_and_random_numbers(monkeypatch):
    """A GAN: two models, two optimizers, latents from Keras' global seed."""

    def build():
        return {
            "generator": sequential((2,), layers.Dense(8, "tanh"), layers.Dense(3)),
            "critic": sequential((3,), layers.Dense(8, "tanh"), layers.Dense(1)),
        }

    def step(models, batch):
        generator, critic = models["generator"], models["critic"]
        real = keras.utils.unpack_x_y_sample_weight(batch)[0]
        latents = keras.random.normal((keras.ops.shape(real)[0], 2))
        with tf.GradientTape(persistent=True) as tape:
            fake = critic(generator(latents))
            critic_loss = kr.replica.mean(tf.nn.softplus(fake) + tf.nn.softplus(-critic(real)))
            generator_loss = kr.replica.mean(tf.nn.softplus(-fake))
        for name, loss in (("critic", critic_loss), ("generator", generator_loss)):
            variables = models[name].trainable_variables
            subject.optimizers[name].apply(tape.gradient(loss, variables), variables)
        return {"critic": critic_loss, "rows": kr.replica.Sum(tf.shape(real)[0])}

    histories, calls = [], []
    for steps in (1, 1, 2):
        if steps > 1:
            calls = several_steps_a_call(monkeypatch)
        subject = kr.ReplicatedTrainer(
            build, layout=kr.Layout(sizes("2x2"), "auto"), train_step=step, seed=3
        )
        subject.compile(
            {"generator": keras.optimizers.Adam(0.01), "critic": keras.optimizers.Adam(0.01)},
            steps_per_execution=steps,
        )
        histories.append(subject.fit(normal(21, 3), batch_size=8, epochs=2, verbose=0).history)
    assert histories[0]["rows"] == [21, 21]
    assert histories[0] == histories[1]
    assert calls == [2]
    assert_close(histories[2], histories[0])
    assert histories[0]["critic"][0] != histories[0]["critic"][1]


def test_several_steps_that_cannot_be_split_run_one_a_call(monkeypatch, capsys):
    calls = several_steps_a_call(monkeypatch)
    check = lowering.check

    def refuse_loops(graph, layers):
        if any(node.type.endswith("While") for node in graph.get_operations()):
            raise lowering.CannotSplitError("no loops here")
        check(graph, layers)

    monkeypatch.setattr(lowering, "check", refuse_loops)
    subject = trainer("mlp", "1x2")
    subject.compile(**adam(), steps_per_execution=4)
    data = SUBJECTS["mlp"][1](64)
    subject.fit(**data, batch_size=16, epochs=2, verbose=0)
    assert "one a call on this mesh, not 16: no loops here" in capsys.readouterr().err
    assert calls == [3]
    assert int(subject.model.optimizer.iterations) == 8


def test_run_gives_one_replica_all_rows():
    subject = trainer("mlp", "2x2")

    def rows_and_total(x):
        return {"total": tf.reduce_sum(x), "x": x, "rows": kr.replica.global_rows()}

    (result,) = subject.run(rows_and_total, np.arange(6.0).reshape(6, 1))
    assert float(result["total"]) == 15
    assert int(result["rows"]) == 6
    np.testing.assert_array_equal(result["x"].numpy().ravel(), np.arange(6.0))


@pytest.mark.slow
def test_convolutions():
    """Kernels and BatchNormalization split by channels."""
    build, data = SUBJECTS["cnn"]
    options = compiled("SGD", 0.1, loss="sparse_categorical_crossentropy")
    weights = build().get_weights()
    expected = on_one_device(build, options, lambda: data(16), weights, batch_size=16)
    keras.backend.clear_session()
    subject = trainer("cnn", "2x2")
    subject.model.set_weights(weights)
    assert_same_run(exercise(subject, options(), data(16), batch_size=16), expected)


# Random numbers


@pytest.mark.slow
def test_dropout_repeats_with_a_seed():
    def build():
        return sequential((6,), layers.Dense(8), layers.Dropout(0.5), layers.Dense(1))

    runs = []
    for _ in range(2):
        subject = kr.ReplicatedTrainer(build, layout=kr.Layout(sizes("2x2"), "auto"), seed=5)
        subject.compile("sgd", "mse")
        history = subject.fit(normal(24, 6), normal(24, 1), batch_size=8, verbose=0).history
        runs.append((history, subject.model.get_weights()))
    assert_close(runs[0], runs[1], rtol=1e-7)


# Callbacks, files


def test_callbacks_see_plain_values(tmp_path):
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            kernel = self.model.layers[0].kernel
            seen.append((kernel.numpy().shape, float(self.model.optimizer.learning_rate)))
            np.testing.assert_array_equal(tf.convert_to_tensor(kernel), kernel.numpy())
            self.model.optimizer.learning_rate = 0.05
            predicted = self.model.predict(normal(4, 6), verbose=0)
            np.testing.assert_allclose(self.model(normal(4, 6)), predicted, rtol=1e-5)

    subject = trainer("mlp", "2x2")
    subject.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    data = SUBJECTS["mlp"][1](16)
    path = str(tmp_path / "model.keras")
    saved = keras.callbacks.ModelCheckpoint(path, monitor="loss")
    stop = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    subject.fit(**data, batch_size=8, epochs=2, verbose=0, callbacks=[Look(), saved, stop])
    assert seen == [((6, 16), pytest.approx(0.1)), ((6, 16), pytest.approx(0.05))]
    subject.save(path)
    subject.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(path)
    assert_close(loaded.get_weights(), subject.model.get_weights(), rtol=1e-7)
    other = trainer("mlp", "1x4")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_close(other.model.get_weights(), subject.model.get_weights(), rtol=1e-7)


@pytest.mark.slow
def test_a_model_object_gets_the_weights_back():
    model = mlp()
    subject = kr.ReplicatedTrainer(model, layout=kr.Layout(sizes("2x2"), "auto"))
    before = model.get_weights()
    subject.compile("sgd", "sparse_categorical_crossentropy")
    subject.fit(**SUBJECTS["mlp"][1](16), batch_size=8, verbose=0)
    assert_close(model.get_weights(), subject.model.get_weights(), rtol=1e-7)
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0
    assert type(compat.raw_variable(model.weights[0])) is type(
        compat.raw_variable(mlp().weights[0])
    )


def test_a_function_that_compiles_its_model():
    def build():
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return model

    subject = kr.ReplicatedTrainer(build, layout=kr.Layout(sizes("2x2"), "auto"))
    subject.fit(**SUBJECTS["mlp"][1](16), batch_size=8, verbose=0)
    assert int(subject.model.optimizer.iterations) == 2


@pytest.mark.slow
def test_weights_that_a_function_assigns():
    weights = [weight + 1 for weight in mlp().get_weights()]

    def build():
        model = mlp()
        model.set_weights(weights)
        return model

    assert_close(trainer_of(build).model.get_weights(), weights, rtol=1e-7)


def trainer_of(build):
    """A trainer on the mesh 2x2 with an automatic layout."""
    return kr.ReplicatedTrainer(build, layout=kr.Layout(sizes("2x2"), "auto"))


@pytest.mark.slow
def test_a_model_without_an_input():
    """Weights are made, and rules checked, when the first batch is known."""
    build = functools.partial(keras.Sequential, [layers.Dense(4, name="a"), layers.Dense(1)])
    mesh = sizes("2x2")
    subject = kr.ReplicatedTrainer(build, layout=kr.Layout(mesh, {".*/a/kernel": (None, "model")}))
    subject.compile("sgd", "mse")
    subject.fit(*regression(16), batch_size=8, verbose=0)
    shards = compat.raw_variable(subject.model.weights[0]).shards()
    assert [part.shape for part in shards] == [(3, 2)] * 4
    wrong = kr.ReplicatedTrainer(build, layout=kr.Layout(mesh, {"b": (None,)}))
    wrong.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'b' matches no variable"):
        wrong.fit(*regression(16), batch_size=8, verbose=0)


# What DTensor cannot carry


def test_substitutes():
    """Operations that crash DTensor, or that it has no rule for."""

    def compute(x):
        return {
            "axis": x[:, None] * x[1:2, None, 2:5, None][:, :, 0],
            "last": x[..., None],
            "reverse": tf.reverse(x, [1]),
            "lower": tf.linalg.band_part(x, -1, 0),
            "band": tf.linalg.band_part(x, 1, 2),
            "classes": tf.one_hot(labels, 6),
            "values": tf.one_hot(labels, 3, 2.0, -1.0, axis=0),
        }

    x, labels = normal(4, 6), tf.constant([5, 0, -1, 2])
    (found,) = trainer("mlp", "2x2").run(compute, x)
    assert_close(found, compute(tf.constant(x)))


def test_recurrent_layers_are_named_before_training():
    def build():
        return sequential((5, 2), layers.LSTM(4, name="memory"), layers.Dense(1))

    subject = trainer_of(build)
    subject.compile("sgd", "mse")
    before = subject.model.get_weights()
    with pytest.raises(ValueError) as caught:
        subject.fit(normal(8, 5, 2), normal(8, 1), batch_size=8, verbose=0)
    for word in ("The layer 'memory' (LSTM)", "TensorList", "unroll=True", "leave out `layout`"):
        assert word in str(caught.value)
    assert_close(subject.model.get_weights(), before, rtol=1e-7)


def test_selections_by_value_are_refused():
    class Selects(layers.Layer):
        def call(self, x):
            return x + tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0))

    subject = trainer_of(lambda: sequential((3,), Selects(name="selects"), layers.Dense(1)))
    subject.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"The layer 'selects' \(Selects\) runs tf.Where"):
        subject.fit(*regression(16), batch_size=8, verbose=0)


@pytest.mark.slow
def test_unrolled_recurrence():
    def build():
        return sequential((5, 2), layers.LSTM(4, unroll=True), layers.Dense(1))

    data = arrays(normal(16, 5, 2), normal(16, 1))
    assert_mesh_as_one_device(build, compiled("SGD", 0.1), data, batch_size=8)


@pytest.mark.parametrize("x", [np.array([["a"], ["b"]]), tf.ragged.constant([[1.0], [2.0, 3.0]])])
def test_inputs_without_parts(x):
    subject = trainer("mlp", "2x2")
    with pytest.raises(ValueError, match="A mesh takes dense tensors of numbers"):
        subject.run(tf.identity, x)


# On batch


@pytest.mark.slow
def test_on_batch_methods():
    data = SUBJECTS["mlp"][1](7)
    weights = mlp().get_weights()
    results = []
    for subject in (mlp(), trainer("mlp", "2x2")):
        subject.compile(**adam())
        getattr(subject, "model", subject).set_weights(weights)
        results.append(
            [
                subject.train_on_batch(data["x"], data["y"]),
                subject.test_on_batch(data["x"], data["y"]),
                subject.predict_on_batch(data["x"]),
            ]
        )
    assert_close(results[1], results[0])


# Checkpoints


def fitted(subject, data, epochs, **fit):
    subject.compile(**adam())
    subject.fit(**data, batch_size=8, epochs=epochs, shuffle=False, verbose=0, **fit)
    return subject


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder of a checkpoint of the first of three epochs on 2x2, the unbroken run, data)."""
    folder, data = tmp_path_factory.mktemp("saved"), SUBJECTS["mlp"][1](20)
    keras.backend.clear_session()
    every = kr.callbacks.Checkpoint(folder, keep=None)
    unbroken = fitted(trainer("mlp", "2x2", seed=1), data, 3, callbacks=[every])
    return folder / "step-00000003", unbroken, data


def on_replicas(count):
    """A trainer of the MLP on replicas."""
    return kr.ReplicatedTrainer(mlp, devices=cpus(count))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(functools.partial(trainer, "mlp", "1x4"), id="1x4"),
        pytest.param(functools.partial(on_replicas, 4), id="4 replicas"),
        pytest.param(functools.partial(trainer, "mlp", "1x1"), id="1x1", marks=pytest.mark.slow),
        pytest.param(functools.partial(on_replicas, 1), id="one", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_a_mesh_goes_on_elsewhere(saved, make):
    """As the unbroken run."""
    folder, unbroken, data = saved
    keras.backend.clear_session()
    resumed = fitted(make(), data, 3, resume=folder)
    assert_close(resumed.model.get_weights(), unbroken.model.get_weights())
    assert_close(resumed.history.history, unbroken.history.history)
    assert int(resumed.model.optimizer.iterations) == 9


@pytest.mark.slow
@pytest.mark.parametrize("replicas, mesh", [(4, "2x2"), (2, "1x4")])
def test_a_checkpoint_of_replicas_goes_on_on_a_mesh(tmp_path, replicas, mesh):
    data = SUBJECTS["mlp"][1](20)
    every = kr.callbacks.Checkpoint(tmp_path, keep=None)
    keras.utils.set_random_seed(1)
    unbroken = fitted(on_replicas(replicas), data, 3, callbacks=[every])
    keras.backend.clear_session()
    resumed = fitted(trainer("mlp", mesh), data, 3, resume=tmp_path / "step-00000003")
    assert_close(resumed.model.get_weights(), unbroken.model.get_weights())
    assert_close(resumed.history.history, unbroken.history.history)


def test_layout_of_the_optimizer():
    """Slots are split like their variable."""
    subject = fitted(trainer("mlp", "1x4"), SUBJECTS["mlp"][1](8), 1)
    split = {
        tuple(variable.shape): compat.raw_variable(variable).shards()[0].shape
        for variable in subject.model.optimizer.variables
    }
    assert split[(6, 16)] == (6, 4)
    assert split[(16, 8)] == (4, 8)
    assert split[()] == ()
