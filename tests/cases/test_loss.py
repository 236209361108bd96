"""Cases of the loss and its gradient in the built-in step (contract, point 2)."""

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import keras_replicator as kr
from tests.helpers import (
    arrays,
    assert_as_one_device,
    assert_close,
    classification,
    column,
    compiled,
    compiled_trainer,
    cpus,
    first_weight,
    fit_toy,
    identity,
    masked_network,
    network,
    normal,
    ones,
    regression,
    sequences,
    sequential,
    toy,
)

one_and_two = pytest.mark.parametrize("replicas", [1, 2])


def mean_of_squares(y, p):
    """A user's own loss: the mean over the batch, as a scalar."""
    return ops.mean(ops.square(y - p))


@one_and_two
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_b02_long_mean_is_exact(replicas):
    """keras#21061: 200 steps of squared error 1 are logged as 1.0 exactly."""
    trainer = compiled_trainer(identity, replicas)
    x = ones(25600)
    history = trainer.fit(x, 0 * x, batch_size=128, verbose=0).history
    assert history["loss"] == [1.0]


def test_b03_evaluate_fit_predict_evaluate():
    """keras#19891: evaluate, fit, predict and evaluate in turn equal one device."""
    x = np.random.default_rng(0).uniform(-1, 1, (12, 1)).astype("float32")
    y = normal(12, 10)
    alone = sequential((1,), layers.Dense(10))
    trainer = kr.ReplicatedTrainer(lambda: sequential((1,), layers.Dense(10)), devices=cpus(2))
    trainer.model.set_weights(alone.get_weights())
    results = []
    for subject in (alone, trainer):
        subject.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
        quiet = {"batch_size": 12, "verbose": 0}
        results.append(
            {
                "before": subject.evaluate(x, y, **quiet),
                "history": subject.fit(x, y, shuffle=False, **quiet).history,
                "predict": subject.predict(x, **quiet),
                "after": subject.evaluate(x, y, **quiet),
            }
        )
    assert_close(results[1], results[0])


@one_and_two
def test_b05_scalar_loss_with_tail_of_one_row(replicas):
    """tensorflow#41657: a tail of one row under a scalar loss: w = 0.6, every loss finite."""
    y = column(0, 0, 0, 0, 3)
    trainer = compiled_trainer(toy, replicas, loss=mean_of_squares)
    history = trainer.fit(ones(5), y, batch_size=4, shuffle=False, verbose=0).history
    assert first_weight(trainer.model) == pytest.approx(0.6, rel=1e-6)
    # Rows 0 lose 0 and the last one 9 before the second update.
    assert history["loss"] == pytest.approx([9 / 5], rel=1e-6)
    alone = toy()
    alone.compile(loss=mean_of_squares)
    alone.set_weights(trainer.model.get_weights())
    expected = alone.evaluate(ones(5), y, batch_size=4, verbose=0)
    assert np.isfinite(expected)
    assert_close(trainer.evaluate(ones(5), y, batch_size=4, verbose=0), expected)


@one_and_two
def test_b06_tail_of_three_rows(replicas):
    """tensorflow#48875: y = 3 in the last row of a tail of three: w = 0.1 * 2 * 3 / 3."""
    w, _ = fit_toy([0, 0, 0, 0, 0, 0, 3], 4, replicas)
    assert w == pytest.approx(0.2, rel=1e-6)


@one_and_two
def test_b06b_tail_of_one_row(replicas):
    """tensorflow#45923: w = 0.1 * 2 * 3; the loss of the epoch is 9 / 5."""
    w, history = fit_toy([0, 0, 0, 0, 3], 4, replicas)
    assert w == pytest.approx(0.6, rel=1e-6)
    assert history["loss"] == pytest.approx([9 / 5], rel=1e-6)


@one_and_two
def test_b07_scalar_loss(replicas):
    """keras#16285: a loss that returns the batch mean as a scalar: w = 0.2, logged loss 1.0."""
    w, history = fit_toy([1, 1, 1, 1], 4, replicas, loss=mean_of_squares)
    assert w == pytest.approx(0.2, rel=1e-6)
    assert history["loss"] == pytest.approx([1.0], rel=1e-6)


def test_b32_class_weight():
    """tensorflow#41290: class weights are not renormalised."""
    assert_as_one_device(
        lambda: network(outputs=2, activation="softmax"),
        compiled("SGD", 0.1, loss="sparse_categorical_crossentropy"),
        arrays(*classification(8), class_weight={0: 1.0, 1: 3.0}),
        batch_size=4,
    )


class Penalty(layers.Dense):
    """Dense that adds 0.5 * w^2 to the loss in its call."""

    def call(self, x):
        self.add_loss(0.5 * ops.sum(ops.square(self.kernel)))
        return super().call(x)


@one_and_two
@pytest.mark.parametrize("case", ["b39", "b39b"])
def test_b39_penalty_counts_once(replicas, case):
    """keras PR 20609: 0.5 * w^2 as regularizer (b39) or by add_loss (b39b): loss 0.5, w = 0.9."""

    def build():
        if case == "b39":
            return toy("ones", kernel_regularizer=keras.regularizers.L2(0.5))
        return sequential((1,), Penalty(1, use_bias=False, kernel_initializer="ones"))

    trainer = compiled_trainer(build, replicas)
    nothing = 0 * ones(4)
    history = trainer.fit(nothing, nothing, batch_size=4, verbose=0).history
    assert history["loss"] == pytest.approx([0.5], rel=1e-6)
    assert first_weight(trainer.model) == pytest.approx(0.9, rel=1e-6)


def test_b39c_activity_regularizer():
    """keras PR 20609: an activity regularizer L2(0.1) equals one device."""
    assert_as_one_device(
        lambda: network(activity_regularizer=keras.regularizers.L2(0.1)),
        compiled("SGD", 0.1),
        arrays(*regression(12)),
        batch_size=4,
        epochs=3,
    )


class MeanAndSum(layers.Layer):
    """Adds a mean and a sum over rows to the loss; `total` makes the sum."""

    def __init__(self, total):
        super().__init__()
        self.total = total

    def call(self, y):
        self.add_loss(0.3 * ops.mean(ops.square(y)))
        self.add_loss(self.total(0.02 * ops.square(y)))
        return y


def test_b39e_add_loss_of_a_mean_and_a_sum():
    """keras PR 20609: add_loss of a row mean and of kr.replica.sum, tail of 3, equal one device."""
    x, y = regression(11)

    def run(make_subject, total, weights=None):
        subject = make_subject(lambda: sequential((3,), layers.Dense(1), MeanAndSum(total)))
        model = getattr(subject, "model", subject)
        if weights is not None:
            model.set_weights(weights)
        initial = model.get_weights()
        subject.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        return initial, subject.fit(x, y, **fit).history, model.get_weights()

    initial, history, weights = run(lambda build: build(), ops.sum)
    _, *replicated = run(
        lambda build: kr.ReplicatedTrainer(build, devices=cpus(2)), kr.replica.sum, initial
    )
    assert_close(replicated, [history, weights])


@one_and_two
def test_b94_sample_weight(replicas):
    """tensorflow#24226: weights 1, 1, 0, 2: w = 0.1 * 2 * (1 + 1 + 0 + 2) / 4."""
    w, _ = fit_toy([1, 1, 1, 1], 4, replicas, sample_weight=[1, 1, 0, 2])
    assert w == pytest.approx(0.2, rel=1e-6)


@one_and_two
def test_b94b_replica_without_weight(replicas):
    """tensorflow#24226: all weights of one replica are 0: w = 0.1 * 2 * (3 * 1 + 1 * 2) / 4."""
    w, history = fit_toy(
        [1, 2, 5, 7], 4, replicas, sample_weight=[3, 1, 0, 0], weighted_metrics=["mae"]
    )
    assert w == pytest.approx(0.25, rel=1e-6)
    assert history["loss"] == pytest.approx([(3 * 1 + 1 * 4) / 4], rel=1e-6)
    assert history["mae"] == pytest.approx([(3 * 1 + 1 * 2) / 4], rel=1e-6)


def test_b94d_fully_masked_replica():
    """tensorflow#24226: the sequences of one replica are fully masked: finite, as one device."""
    actual, _ = assert_as_one_device(
        masked_network, compiled("SGD", 0.1), arrays(*sequences([5, 3, 0, 0], 5)), batch_size=4
    )
    assert np.isfinite(actual.history["loss"]).all()


def test_c11b_local_mean():
    """C11b: kr.local_mean keeps a scalar loss on each replica's rows; see the case for the sums."""
    loss = kr.local_mean(lambda y, p: ops.mean(y - p) ** 3)
    w, history = fit_toy([0, 0, 1, 1, 1], 4, loss=loss)
    assert w == pytest.approx(0.36675, rel=1e-5)
    assert history["loss"] == pytest.approx([0.522825], rel=1e-5)


def test_c12_two_outputs_one_masked():
    """C12: outputs 'seq' under a mask and 'all' without: weights and all logs of one device."""

    def build():
        x = keras.Input((5, 2))
        seq = layers.Dense(1, name="seq")(layers.Masking()(x))
        return keras.Model(x, {"seq": seq, "all": layers.Dense(1, name="all")(x)})

    x, y = sequences([5, 5, 4, 5, 1, 2, 1, 1])
    assert_as_one_device(
        build,
        compiled(
            "SGD",
            0.1,
            loss={"seq": "mse", "all": "mae"},
            metrics=lambda: {"seq": ["mae"], "all": ["mse"]},
            more=lambda: {"loss_weights": {"seq": 0.7, "all": 2.0}},
        ),
        arrays(x, {"seq": y, "all": 2 * y + 1}),
        batch_size=4,
        epochs=3,
    )


@one_and_two
def test_c13_mean_with_sample_weight(replicas):
    """C13: divides by the global sum of the weights: w = 0.1 * 2 * (1 + 1 + 15) / 5."""
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    w, _ = fit_toy([1, 1, 1, 5], 4, replicas, sample_weight=[1, 1, 0, 3], loss=loss)
    assert w == pytest.approx(0.68, rel=1e-6)


def test_c14_reduction_sum():
    """C14: reduction 'sum', tail of 3: w and loss of one device."""
    actual, _ = assert_as_one_device(
        toy,
        compiled("SGD", 0.01, loss=losses.MeanSquaredError(reduction="sum")),
        arrays(ones(7), column(*range(7))),
        batch_size=4,
    )
    # Gradients -2 * 6 and 2 * (3 * 0.12 - 15).
    assert actual.weights[0].item() == pytest.approx(0.12 + 0.02 * (15 - 0.36), rel=1e-5)


@one_and_two
def test_c14c_reduction_none(replicas):
    """C14c: reduction 'none' takes the gradient of the sum over rows."""
    loss = losses.MeanSquaredError(reduction="none")
    w, _ = fit_toy(range(6), 4, replicas, learning_rate=0.01, loss=loss)
    assert w == pytest.approx(0.12 + 0.02 * (9 - 0.24), rel=1e-5)


def test_c18_three_classes_on_four_replicas():
    """C18: 12 updates of SGD with momentum, tail of 5: weights, loss, accuracy of one device."""
    actual, _ = assert_as_one_device(
        lambda: network(outputs=3, activation="softmax"),
        compiled(
            "SGD",
            0.1,
            momentum=0.9,
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        ),
        arrays(*classification(21, 3)),
        replicas=4,
        batch_size=8,
        epochs=4,
    )
    assert actual.iterations == 12


def test_s14_masks_of_very_different_lengths():
    """Found by reading: the mask's denominator is the global number of valid steps."""
    assert_as_one_device(
        masked_network,
        compiled("SGD", 0.1),
        arrays(*sequences([5, 5, 4, 5, 1, 2, 1, 1])),
        batch_size=8,
        epochs=3,
    )


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "none"])
def test_circle_loss_compares_all_rows(reduction):
    """Circle gives one value per row that depends on all other rows of the batch."""
    labels = (np.arange(9) % 3).astype("int32")
    weights = None if reduction == "none" else np.arange(9) % 4
    assert_as_one_device(
        lambda: network(outputs=4),
        lambda: {
            "optimizer": keras.optimizers.SGD(0.001),
            "loss": losses.Circle(reduction=reduction),
        },
        arrays(normal(9, 3), labels, weights),
        replicas=3,
        batch_size=7,
    )
