"""Cases of the optimizer: order of reduction and clipping, accumulation, precision (point 3)."""

import json

import keras
import numpy as np
import pytest
from keras import layers, optimizers

import keras_replicator as kr
from tests.helpers import (
    arrays,
    assert_as_one_device,
    assert_close,
    column,
    compiled,
    compiled_trainer,
    cpus,
    first_weight,
    fit_toy,
    network,
    normal,
    on_one_device,
    on_replicas,
    ones,
    regression,
    run_script,
    sequential,
    toy,
)

one_and_two = pytest.mark.parametrize("replicas", [1, 2])


def assert_equal_or_refused(build, compile_options, data, named, compile_more, **fit):
    """Two replicas equal one device, or refuse with an error that has one of the words `named`."""
    weights = build().get_weights()
    expected = on_one_device(build, compile_options, data, weights, **fit)

    def options():
        return {**compile_options(), **compile_more}

    try:
        actual = on_replicas(2, build, options, data, weights, **fit)
    except Exception as error:
        assert any(word in str(error) for word in named), error
        return
    assert_close(actual.weights, expected.weights, what="weights")
    assert_close(actual.history, expected.history, what="history")


# Clipping sees the averaged gradient


@one_and_two
@pytest.mark.parametrize("y", [(10, 10, 10, 10), (10, 10, -2, -2)], ids=["b09", "b09b"])
def test_b09_global_clipnorm(replicas, y):
    """tensorflow#33929: the averaged gradient (-20, and -8 in b09b) is clipped to -1: w = 1."""
    w, _ = fit_toy(y, 4, replicas, optimizer=optimizers.SGD(1.0, global_clipnorm=1.0))
    assert w == pytest.approx(1.0, rel=1e-6)


# Accumulation


class NotesWeights(keras.callbacks.Callback):
    """Notes the weight of `toy` after every batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(first_weight(self.model))


@one_and_two
def test_b11_accumulation_updates_every_second_step(replicas):
    """tensorflow#32176: w is 0 after the first step and 0.2 after the second."""
    trainer = compiled_trainer(toy, replicas, gradient_accumulation_steps=2)
    notes = NotesWeights()
    trainer.fit(ones(8), ones(8), batch_size=4, verbose=0, callbacks=[notes])
    assert notes.seen == pytest.approx([0.0, 0.2], rel=1e-6)
    assert int(trainer.model.optimizer.iterations) == 1


@one_and_two
def test_b11b_accumulation_with_momentum(replicas):
    """keras#17429: two updates are two momentum steps on batches of 8."""
    optimizer = optimizers.SGD(0.01, momentum=0.9)
    w, _ = fit_toy(range(16), 4, replicas, optimizer=optimizer, gradient_accumulation_steps=2)
    # Mean targets 3.5 and 11.5.
    first = 0.01 * 2 * 3.5
    second = 0.9 * first + 0.01 * 2 * (11.5 - first)
    assert w == pytest.approx(first + second, rel=1e-5)


@one_and_two
def test_b11c_accumulation_with_adam(replicas):
    """tf-keras#301: two steps of 4 rows are one step of Adam on the 8 rows: w = 0.1."""
    optimizer = optimizers.Adam(0.1)
    w, _ = fit_toy(range(8), 4, replicas, optimizer=optimizer, gradient_accumulation_steps=2)
    # The first step of Adam is lr * g / (|g| + epsilon).
    assert w == pytest.approx(0.1, rel=1e-5)


@one_and_two
def test_c20_accumulated_mean_is_over_rows(replicas):
    """C20: batches of 4 and 2 rows: the mean over the 6 rows that were seen: w = 0.2."""
    w, _ = fit_toy([0, 0, 0, 0, 3, 3], 4, replicas, gradient_accumulation_steps=2)
    assert w == pytest.approx(0.2, rel=1e-6)


@one_and_two
def test_c20b_partial_window_ends_with_the_epoch(replicas):
    """C20b: 5 rows in batches of 2: two updates an epoch: w = 3 * (1 - 0.8^4), iterations 4."""
    trainer = compiled_trainer(toy, replicas, gradient_accumulation_steps=2)
    fit = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0}
    trainer.fit(ones(5), 3 * ones(5), **fit)
    assert first_weight(trainer.model) == pytest.approx(1.7712, rel=1e-5)
    assert int(trainer.model.optimizer.iterations) == 4


# Precision and XLA


@pytest.mark.parametrize("replicas", [1, 2])
def test_b10_mixed_float16_under_xla(replicas):
    """keras#21366: mixed_float16 with jit_compile=True trains, or an error says that XLA is out."""
    keras.config.set_dtype_policy("mixed_float16")

    def build():
        hidden = (layers.Dense(64, activation="relu") for _ in range(2))
        return sequential((8,), *hidden, layers.Dense(10, dtype="float32"))

    x, y = regression(64, 8, 10)
    try:
        trainer = compiled_trainer(
            build, replicas, optimizer=optimizers.Adam(0.001), jit_compile=True
        )
        history = trainer.fit(x, y, batch_size=32, verbose=0).history
    except Exception as error:
        assert "XLA" in str(error) or "jit_compile" in str(error), error
        return
    assert np.isfinite(history["loss"]).all()


@one_and_two
def test_s03_one_overflow_skips_the_update_everywhere(replicas):
    """keras#21366: inf in the last row of the first batch: w = 0 and scale 16384, then w = 0.2."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1))
    trainer = compiled_trainer(toy, replicas, optimizer=optimizer)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    trainer.fit(column(1, 1, 1, np.inf), ones(4), **fit)
    assert first_weight(trainer.model) == 0.0
    assert float(trainer.model.optimizer.dynamic_scale) == 16384.0
    trainer.fit(ones(4), ones(4), **fit)
    assert first_weight(trainer.model) == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("jit_compile", [True, "auto"])
def test_b35_jit_compile(jit_compile):
    """keras#19005: 20 updates under XLA equal one device; True may be refused by name."""
    assert_equal_or_refused(
        network,
        compiled("SGD", 0.05),
        arrays(*regression(20)),
        named=["jit_compile", "XLA"] if jit_compile is True else [],
        compile_more={"jit_compile": jit_compile},
        batch_size=4,
        epochs=4,
    )


# Embeddings: ids 8 and 9 never occur; others repeat in a row, in a replica and between replicas.

IDS = np.array(
    [[0, 0, 1], [1, 2, 3], [0, 4, 4], [5, 1, 0], [6, 6, 6], [2, 7, 0], [3, 3, 1], [7, 0, 5]],
    "int32",
)


def embedding():
    mean = layers.GlobalAveragePooling1D()
    return sequential((3,), layers.Embedding(10, 4), mean, layers.Dense(1), dtype="int32")


def test_b30_repeated_ids():
    """keras#21069: the table equals one device; rows of ids that never occur stay bit-equal."""
    weights = embedding().get_weights()
    data = arrays(IDS, normal(8, 1))
    run = {"batch_size": 4, "epochs": 2}
    expected = on_one_device(embedding, compiled("SGD", 0.1), data, weights, **run)
    actual = on_replicas(2, embedding, compiled("SGD", 0.1), data, weights, **run)
    assert_close(actual.weights, expected.weights, what="weights")
    assert (actual.weights[0][8:] == weights[0][8:]).all()


def test_b30b_repeated_ids_with_adam():
    """keras#21069: the same with Adam."""
    data = arrays(IDS, normal(8, 1))
    assert_as_one_device(embedding, compiled("Adam", 0.05), data, batch_size=4, epochs=2)


def test_b36_embedding_under_xla():
    """keras#18110: the same with jit_compile=True, or an error that names it."""
    assert_equal_or_refused(
        embedding,
        compiled("SGD", 0.1),
        arrays(IDS, normal(8, 1)),
        named=["jit_compile", "XLA"],
        compile_more={"jit_compile": True},
        batch_size=4,
        epochs=2,
    )


# Objects and settings


class CountsCalls(layers.Layer):
    """Counts its calls in an integer weight."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls"
        )

    def call(self, x):
        self.calls.assign_add(1)
        return x


@one_and_two
def test_b25_integer_weight_counts_steps(replicas):
    """keras#20700: a counter that call increments is 3 after 3 steps, not 3 * N."""

    def build():
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        return sequential((1,), CountsCalls(), dense)

    trainer = compiled_trainer(build, replicas)
    trainer.fit(ones(12), ones(12), batch_size=4, shuffle=False, verbose=0)
    assert int(trainer.model.layers[0].calls) == 3
    assert int(trainer.model.optimizer.iterations) == 3


@one_and_two
def test_b27_sequential_without_input(replicas):
    """keras#20045: an unbuilt Sequential builds on the first fit and trains as one device."""

    def build():
        seeds = [keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2)]
        return keras.Sequential(
            [
                layers.Dense(8, activation="tanh", kernel_initializer=seeds[0]),
                layers.Dense(1, kernel_initializer=seeds[1]),
            ]
        )

    options, data = compiled("Adam", 0.01), arrays(*regression(9))
    expected = on_one_device(build, options, data, batch_size=4)
    actual = on_replicas(replicas, build, options, data, batch_size=4)
    assert_close(actual.weights, expected.weights, what="weights")
    assert_close(actual.history, expected.history, what="history")


@one_and_two
def test_b29_learning_rate_schedule(replicas):
    """keras#19504: 4 steps, the last one of 4 rows: iterations 4, learning rate 0.1 * 0.5^4."""
    schedule = optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)

    def build():
        return sequential((2,), layers.Dense(2, kernel_initializer="zeros"))

    trainer = compiled_trainer(build, replicas, optimizer=optimizers.SGD(schedule))
    x = np.ones((100, 2), "float32")
    trainer.fit(x, x, batch_size=32, shuffle=False, verbose=0)
    optimizer = trainer.model.optimizer
    assert int(optimizer.iterations) == 4
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * 0.5**4, rel=1e-6)
    # Each of the two outputs is w1 + w2 + b, which stay equal: their gradient is (3 w - 1) * 2 / 2.
    w = 0.0
    for step in range(4):
        w += 0.1 * 0.5**step * (1 - 3 * w)
    assert_close(trainer.model.get_weights(), [np.full((2, 2), w), np.full(2, w)])


def test_b34_optimizer_made_before_the_trainer():
    """keras#17187: an optimizer made before trains as one device, or the error names it."""
    optimizer = optimizers.Adam(0.01)
    data = arrays(ones(8), column(*range(8)))
    expected = on_one_device(toy, compiled("Adam", 0.01), data, batch_size=4)
    try:
        trainer = compiled_trainer(toy, optimizer=optimizer)
        trainer.fit(**data(), batch_size=4, shuffle=False, verbose=0)
    except Exception as error:
        assert "optimizer" in str(error), error
        return
    assert_close(trainer.model.get_weights(), expected.weights, what="weights")


@pytest.mark.filterwarnings("ignore:.*eager")
def test_b64_run_eagerly():
    """tensorflow#51900: run_eagerly=True gives the numbers of one device."""
    assert_as_one_device(
        network,
        compiled("Adam", 0.01),
        arrays(*regression(10)),
        compile_more={"run_eagerly": True},
        batch_size=4,
        epochs=2,
    )


def test_c22_adamw_on_four_replicas():
    """C22: 20 updates of AdamW, tails of 5 rows: weights and history to 1e-5."""
    actual, _ = assert_as_one_device(
        network,
        compiled("AdamW", 0.01, weight_decay=0.1),
        arrays(*regression(23)),
        replicas=4,
        batch_size=6,
        epochs=5,
    )
    assert actual.iterations == 20


@one_and_two
def test_c24_learning_rate_set_between_fits(replicas):
    """C24: w = 0.2 + 0.05 * 2 * 0.8 = 0.28."""
    trainer = compiled_trainer(toy, replicas)
    trainer.fit(ones(4), ones(4), batch_size=4, verbose=0)
    trainer.model.optimizer.learning_rate = 0.05
    trainer.fit(ones(4), ones(4), batch_size=4, verbose=0)
    assert first_weight(trainer.model) == pytest.approx(0.28, rel=1e-6)


MEMORY = """
import json
import os
from pathlib import Path

import keras

import keras_replicator as kr
from tests.helpers import network, regression

kr.simulate_devices(2)


class NotesMemory(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.megabytes = []

    def on_epoch_end(self, epoch, logs=None):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.megabytes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)


trainer = kr.ReplicatedTrainer(lambda: network(31), devices=["CPU:0", "CPU:1"])
trainer.compile(optimizer="sgd", loss="mse")
notes = NotesMemory()
trainer.fit(*regression(5120, 31), batch_size=256, epochs=40, verbose=0, callbacks=[notes])
print(json.dumps(notes.megabytes))
"""


def test_b61_memory_is_flat():
    """tensorflow#42616: resident memory grows by less than 1 MB an epoch after a warm-up of 16."""
    finished = run_script(MEMORY, timeout=280)
    assert finished.returncode == 0, finished.stdout
    megabytes = json.loads(finished.stdout.splitlines()[-1])
    growth = np.mean(megabytes[32:40]) - np.mean(megabytes[16:24])
    assert growth / 16 < 1.0


# What the user set on the optimizer


def accumulated(optimizer, replicas=2, build=network, loss="mse", batch_size=4, **compile_more):
    """A trainer after two epochs on 16 rows, and plain Keras with batches twice as large."""
    x, y = regression(16)
    y = [y, y] if isinstance(loss, list) else y
    alone = build()
    trainer = compiled_trainer(
        build, replicas, optimizer=optimizer(True), loss=loss, **compile_more
    )
    trainer.model.set_weights(alone.get_weights())
    alone.compile(optimizer=optimizer(False), loss=loss)
    for subject, rows in ((alone, 2 * batch_size), (trainer, batch_size)):
        subject.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return trainer, alone


@pytest.mark.parametrize("replicas", [1, 3])
def test_accumulation_set_on_the_optimizer(replicas):
    """keras#17429: `gradient_accumulation_steps` of the optimizer; iterations count updates."""

    def make(own):
        schedule = optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
        return optimizers.Adam(schedule, gradient_accumulation_steps=2 if own else None)

    trainer, alone = accumulated(make, replicas)
    assert_close(trainer.model.get_weights(), alone.get_weights())
    assert int(trainer.optimizers["optimizer"].iterations) == 4
    # The optimizer of a trainer still accumulates when it is compiled again.
    trainer.compile(trainer.optimizers["optimizer"], "mse")
    trainer.fit(*regression(16), batch_size=4, verbose=0)
    assert int(trainer.optimizers["optimizer"].iterations) == 6


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_accumulation_leaves_weights_without_gradient():
    """Weight decay does not touch weights that the loss does not reach, as on one device."""

    def build():
        x = keras.Input((3,))
        return keras.Model(x, [layers.Dense(1)(x), layers.Dense(1, name="unused")(x)])

    trainer, alone = accumulated(
        lambda own: optimizers.AdamW(0.1, weight_decay=0.5),
        build=build,
        loss=["mse", None],
        gradient_accumulation_steps=2,
    )
    assert_close(trainer.model.get_weights(), alone.get_weights())


def test_16201_weights_excluded_from_decay_by_name():
    """keras#16201: `exclude_from_weight_decay(var_names=…)` before the optimizer is passed on."""

    def compile_options():
        optimizer = optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return {"optimizer": optimizer, "loss": "mse"}

    assert_as_one_device(
        lambda: network(bias_initializer="ones"), compile_options, arrays(*regression(8)), epochs=2
    )


def test_16201_weights_excluded_from_decay_by_variable():
    """keras#16201: `var_list` names weights of the model object that is passed."""
    weights, trained = network().get_weights(), []
    for replicas in (None, 2):
        model = network()
        model.set_weights(weights)
        optimizer = optimizers.SGD(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        subject = model if replicas is None else kr.ReplicatedTrainer(model, devices=cpus(2))
        subject.compile(optimizer=optimizer, loss="mse")
        subject.fit(*regression(8), verbose=0)
        trained.append(model.get_weights())
    assert_close(trained[1], trained[0])


def test_optimizer_of_the_user_stays_its_own():
    """An optimizer that was made outside is the trained one: its rate can be set, its steps read.

    Neither its rate, a function, nor a schedule without a config can be written down.
    """

    class Halving(optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 * 0.5 ** keras.ops.cast(step, "float32")

    for make in (lambda: optimizers.SGD(0.1), lambda: optimizers.SGD(Halving())):
        trained = []
        for replicas in (None, 2):
            optimizer = make()

            def set_rate(epoch, logs=None, optimizer=optimizer):
                if epoch and not callable(optimizer._learning_rate):
                    optimizer.learning_rate = 0.01

            subject = toy() if replicas is None else kr.ReplicatedTrainer(toy, devices=cpus(2))
            subject.compile(optimizer=optimizer, loss="mse")
            rate = keras.callbacks.LambdaCallback(on_epoch_begin=set_rate)
            subject.fit(ones(4), ones(4), epochs=3, callbacks=[rate], verbose=0)
            assert int(optimizer.iterations) == 3
            trained.append(getattr(subject, "model", subject).get_weights())
        assert_close(trained[1], trained[0])
