"""Gradients of collectives against finite differences (contract, point 8).

What counts is the average of the replicas' losses, weighted by their rows: what a step's
optimizer descends. Numbers are float64, so that differences are good to more than 1e-5.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from tests.helpers import assert_close, cpus, sequential

EPSILON = 1e-4
FEATURES = 2


def score(value, rows):
    """A loss of this replica, a mean over its rows, in which `value` takes part unevenly."""
    value = tf.reshape(value, [-1])
    slopes = tf.range(1, tf.size(value) + 1)
    total = tf.reduce_sum(tf.sin(value) * tf.cast(slopes, value.dtype))
    return tf.reduce_mean((1 + rows[:, 0]) * total + tf.square(rows[:, 1]))


def of_total(collective):
    """The loss of a collective on the sum of the replica's rows, shape [FEATURES]."""
    return lambda rows: score(collective(tf.reduce_sum(rows, axis=0)), rows)


def gathered_along_1(rows):
    return score(kr.replica.all_gather(tf.transpose(rows), axis=1), rows)


def contrast(rows):
    """InfoNCE: each row among the halves of all rows."""
    candidates = kr.replica.all_gather(rows, axis=0)
    begin = kr.replica.replica_id() * kr.replica.global_rows() // kr.replica.num_replicas()
    labels = begin + tf.range(tf.shape(rows)[0])
    logits = tf.matmul(tf.sin(rows), candidates, transpose_b=True)
    return kr.replica.mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def normalized(rows):
    """Mean over learned weights: they are in the numerator and in the global denominator."""
    return kr.replica.mean(
        tf.sin(rows[:, 0]), sample_weight=tf.exp(rows[:, 1]), normalize="weights"
    )


LOSSES = {
    "all_sum": of_total(kr.replica.all_sum),
    "all_mean": of_total(kr.replica.all_mean),
    "all_min": of_total(kr.replica.all_min),
    "all_max": of_total(kr.replica.all_max),
    "all_gather": of_total(kr.replica.all_gather),
    "all_gather, axis 0": lambda rows: score(kr.replica.all_gather(rows, axis=0), rows),
    "all_gather, axis 1": gathered_along_1,
    "broadcast": of_total(lambda value: kr.replica.broadcast(value, source=1)),
    "mean": lambda rows: kr.replica.mean(tf.sin(rows)),
    "mean, weights": lambda rows: kr.replica.mean(tf.sin(rows[:, 0]), sample_weight=rows[:, 1]),
    "mean by weights": normalized,
    "sum": lambda rows: kr.replica.sum(tf.sin(rows)),
    "sum, squared by all_sum": lambda rows: tf.square(
        kr.replica.all_sum(tf.reduce_sum(tf.sin(rows)))
    ),
    "InfoNCE": contrast,
}


def values(count):
    return np.random.default_rng(count).normal(size=(count, FEATURES))


def differences(function, point):
    """Central differences of a function of an array: [..., *point.shape]."""
    slopes = []
    for where in np.ndindex(*point.shape):
        step = np.zeros_like(point)
        step[where] = EPSILON
        slopes.append((function(point + step) - function(point - step)) / (2 * EPSILON))
    slopes = np.stack(slopes, axis=-1)
    return slopes.reshape(*slopes.shape[:-1], *point.shape)


def shares(parts):
    """Each replica's part of all rows."""
    rows = np.array([len(part) for part in parts], "float64")
    return rows / rows.sum()


@pytest.mark.parametrize(
    "count, replicas",
    [
        pytest.param(4, 2, marks=pytest.mark.slow, id="equal rows"),
        pytest.param(5, 3, id="unequal rows"),
        pytest.param(3, 4, id="a replica without rows"),
    ],
)
def test_gradient_towards_rows(count, replicas):
    """What every replica's loss sends back into every row, whichever replica holds it."""
    trainer = kr.ReplicatedTrainer(
        lambda: sequential((FEATURES,), layers.Dense(1)), devices=cpus(replicas)
    )

    def losses_and_gradients(rows):
        results = {}
        for name, loss_of in LOSSES.items():
            with tf.GradientTape() as tape:
                tape.watch(rows)
                loss = loss_of(rows)
            results[name] = loss, tape.gradient(loss, rows)
        return rows, results

    def run(x):
        outputs = trainer.run(losses_and_gradients, x)
        held = shares([part for part, _ in outputs])
        results = [results for _, results in outputs]
        return [pair for pair in zip(held, results, strict=True) if pair[0]]

    def losses(x):
        """The weighted average of each loss, in the order of LOSSES."""
        return sum(
            share * np.array([float(results[name][0]) for name in LOSSES])
            for share, results in run(x)
        )

    point = values(count)
    found = run(point)
    actual = {
        name: np.concatenate([share * results[name][1].numpy() for share, results in found])
        for name in LOSSES
    }
    wrong = [
        name
        for name, expected in zip(LOSSES, differences(losses, point), strict=True)
        if not np.allclose(actual[name], expected, rtol=1e-5, atol=1e-6)
    ]
    assert not wrong


UPDATED = ["all_sum", "all_gather, axis 0", "broadcast", "mean", "sum"]


def test_gradient_of_an_update():
    """One update of SGD(1) subtracts the derivative of the row-weighted average: 5 rows on 3."""

    def build():
        dense = layers.Dense(FEATURES, use_bias=False, dtype="float64", name="dense")
        model = sequential((FEATURES,), dense, dtype="float64")
        model.set_weights([kernel])
        return model

    def train_step(model, rows):
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of(tf.matmul(rows, tf.convert_to_tensor(variables[0])))
        trainer.optimizers["optimizer"].apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def loss_of(outputs):
        return tf.add_n([LOSSES[name](outputs) for name in UPDATED])

    def average(kernel):
        outputs = trainer.run(lambda x, k: (loss_of(tf.matmul(x, k)), x), rows, same(kernel))
        held = shares([part for _, part in outputs])
        return sum(share * float(loss) for share, (loss, _) in zip(held, outputs, strict=True))

    def same(kernel):
        return kr.PerReplica([tf.constant(kernel)] * 3)

    rows, kernel = values(5), values(FEATURES)
    trainer = kr.ReplicatedTrainer(build, devices=cpus(3), train_step=train_step)
    trainer.compile(optimizer=keras.optimizers.SGD(1.0))
    expected = kernel - differences(average, kernel)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(5)
    trainer.fit(data, epochs=1, verbose=0)
    assert_close(trainer.model.get_weights(), [expected], what="weights")
