"""The parity registry: one row, one promise of the contract, checked on 1, 2, 3, 4 and 8 replicas.

A new feature is one new `Row` in `ROWS`. Its reference is plain Keras on one device.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops

import keras_replicator as kr
from tests.helpers import (
    arrays,
    classification,
    compiled,
    masked_network,
    network,
    normal,
    regression,
    sequences,
    sequential,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration of the registry.

    Args:
        name: what the row shows.
        build: function that makes the model.
        compile: function that makes the arguments of `compile`.
        data: function that makes the data arguments of `fit`.
        batch_size: global rows per step.
        epochs: int.
        accumulate: `gradient_accumulation_steps`; the batches of the reference are that many
            times as large.
        compile_more: arguments of `compile` that plain Keras does not know.
        reference_build: the model of the reference where it is written differently on one device.
        replicas: counts that `make test` runs in any case.
        rtol: relative tolerance.
    """

    name: str
    build: Callable
    compile: Callable
    data: Callable
    batch_size: int = 8
    epochs: int = 2
    accumulate: int = 1
    compile_more: dict = dataclasses.field(default_factory=dict)
    reference_build: Callable | None = None
    replicas: tuple = ()
    rtol: float = 1e-5


def lstm_network():
    lstm = layers.LSTM(3, return_sequences=True)
    return sequential((5, 2), layers.Masking(), lstm, layers.Dense(1))


def two_outputs():
    """One output per step under a mask, and one per step without."""
    x = keras.Input((5, 2))
    masked = layers.Dense(1, name="masked")(layers.Masking()(x))
    return keras.Model(x, {"masked": masked, "all": layers.Dense(1, name="all")(x)})


def two_targets():
    x, y = sequences([5, 1, 5, 2, 1, 3])
    return {"x": x, "y": {"masked": y, "all": 2 * y + 1}}


class AddsLoss(layers.Layer):
    """Passes its input on and adds `function(input)` to the loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


class PenalizedDense(layers.Dense):
    """Dense that adds a penalty of its kernel in `call`."""

    def call(self, x):
        self.add_loss(0.05 * ops.sum(ops.square(self.kernel)))
        return super().call(x)


def adds_loss(function):
    return sequential((3,), layers.Dense(2), AddsLoss(function), layers.Dense(1))


def adds_replica_sum(total):
    return adds_loss(lambda h: total(0.02 * ops.square(h)))


def sum_on_one_device(per_row):
    return ops.sum(ops.mean(per_row, axis=-1))


def penalized():
    return sequential((3,), PenalizedDense(3, activation="tanh"), layers.Dense(1))


def square(h):
    return 0.3 * ops.mean(ops.square(h))


def frozen():
    model = network()
    model.layers[0].trainable = False
    return model


def constrained():
    return network(kernel_constraint=keras.constraints.MaxNorm(0.5))


def embedding():
    mean = layers.GlobalAveragePooling1D()
    return sequential((4,), layers.Embedding(10, 4), mean, layers.Dense(1), dtype="int32")


def ids():
    numbers = np.random.default_rng(0).integers(0, 8, (18, 4))
    return {"x": numbers.astype("int32"), "y": normal(18, 1)}


def string_lookup():
    words = keras.Input((1,), dtype="string")
    known = layers.StringLookup(vocabulary=["red", "green", "blue"])(words)
    return keras.Model(words, layers.Dense(1)(layers.Flatten()(layers.Embedding(4, 3)(known))))


def strings():
    words = [["red"], ["blue"], ["grey"], ["green"], ["blue"]] * 2
    return {"x": tf.constant(words), "y": normal(10, 1)}


def normalized():
    # A bias in front of the normalization would have the gradient 0: nothing but rounding errors.
    hidden = layers.Dense(4, use_bias=False)
    normalization = layers.BatchNormalization(momentum=0.8)
    return sequential((3,), hidden, normalization, layers.Activation("tanh"), layers.Dense(1))


def mixed():
    return sequential((3,), layers.Dense(1, dtype="mixed_float16"))


def one_overflow():
    """16 rows; the gradient of the last one overflows float16 at any loss scale of the run."""
    x, y = 0.1 * normal(16, 3), 0.1 * normal(16, 1, seed=1)
    x[15] = [6e4, 0.0, 0.0]
    return {"x": x, "y": y}


def loss_scaled():
    optimizer = keras.optimizers.SGD(0.05)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
    return {"optimizer": scaled, "loss": "mse"}


def scalar_mean(y, p):
    return ops.mean(ops.abs(y - p) ** 1.5)


def scalar_sum(y, p):
    return ops.sum(ops.square(y - p))


def dice(y, p):
    return 1 - (2 * ops.sum(y * p) + 1) / (ops.sum(y) + ops.sum(p) + 1)


def binary(count):
    x, y = classification(count)
    return arrays(x, y.astype("float32").reshape(-1, 1))


def reduced(reduction):
    return compiled("SGD", 0.02, loss=losses.MeanSquaredError(reduction=reduction), metrics=["mae"])


def weights_of(count):
    return (np.arange(count) % 4).astype("float32")


def rows(count):
    return arrays(*regression(count))


def weighted(count):
    return arrays(*regression(count), weights_of(count))


def decayed():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, decay_steps=1, decay_rate=0.7)
    return {"optimizer": keras.optimizers.SGD(schedule), "loss": "mse"}


def regularized(**options):
    return functools.partial(network, **options)


L2 = keras.regularizers.L2(0.1)
SYNC = {"sync_batch_norm": True}
step_weights = np.repeat(weights_of(6)[:, None], 5, axis=1)
padded = arrays(*sequences([5, 5, 1, 2, 4, 1]))
padded_weighted = arrays(*sequences([5, 1, 2, 5, 4, 3]), step_weights)
three_classes = functools.partial(network, outputs=3, activation="softmax")
class_weighted = arrays(*classification(13, 3), class_weight={0: 1, 1: 3, 2: 0.5})
sigmoid = functools.partial(network, activation="sigmoid")

sgd = compiled("SGD", 0.1, metrics=["mae"])
momentum = functools.partial(compiled, "SGD", 0.1, momentum=0.9)
weighted_metric = compiled("SGD", 0.1, more=lambda: {"weighted_metrics": ["mae"]})
crossentropy = compiled("SGD", 0.1, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
two_losses = compiled(
    "SGD",
    0.1,
    loss={"masked": "mse", "all": "mae"},
    more=lambda: {"loss_weights": {"masked": 0.7, "all": 2.0}},
)

ROWS = [
    Row("plain", network, sgd, rows(32), 16),
    Row("tail of 6", network, sgd, rows(70), 16, replicas=(4,)),
    Row("tail of 1", network, sgd, rows(17), 8, replicas=(4,)),
    Row("3 empty replicas", network, sgd, rows(5), 1, replicas=(4,)),
    Row("sample weights", network, weighted_metric, weighted(13)),
    Row("class weights", three_classes, crossentropy, class_weighted),
    Row("masks", masked_network, sgd, padded, 4),
    Row("masks and sample weights", masked_network, sgd, padded_weighted, 4),
    Row("masked LSTM", lstm_network, sgd, padded, 4),
    Row("two outputs, one mask", two_outputs, two_losses, two_targets, 4),
    Row("sum_over_batch_size", network, reduced("sum_over_batch_size"), weighted(13)),
    Row("sum", network, reduced("sum"), weighted(13)),
    Row("mean", network, reduced("mean"), weighted(13)),
    Row("mean_with_sample_weight", network, reduced("mean_with_sample_weight"), weighted(13)),
    Row("no reduction", network, reduced("none"), rows(16)),
    Row("scalar loss, mean", network, compiled("SGD", 0.1, loss=scalar_mean), rows(13)),
    Row("scalar loss, sum", network, compiled("SGD", 0.01, loss=scalar_sum), rows(13)),
    Row("scalar loss, Dice", sigmoid, compiled("SGD", 0.1, loss=dice), binary(13)),
    Row("L2", regularized(kernel_regularizer=L2), sgd, rows(13)),
    Row("activity regularizer", regularized(activity_regularizer=L2), sgd, rows(13)),
    Row("add_loss, penalty", penalized, sgd, rows(13)),
    Row("add_loss, row mean", lambda: adds_loss(square), sgd, rows(13)),
    Row(
        "add_loss, replica sum",
        lambda: adds_replica_sum(kr.replica.sum),
        sgd,
        rows(13),
        reference_build=lambda: adds_replica_sum(sum_on_one_device),
    ),
    Row("clipnorm", network, momentum(clipnorm=0.2), rows(13)),
    Row("global_clipnorm", network, momentum(global_clipnorm=0.3), rows(13)),
    Row("clipvalue", network, momentum(clipvalue=0.1), rows(13)),
    Row("accumulation", network, momentum(), rows(20), 4, accumulate=2),
    Row("accumulation, partial", network, compiled("Adam", 0.01), rows(13), 2, accumulate=3),
    Row("EMA", network, compiled("Adam", 0.01, use_ema=True, ema_momentum=0.9), rows(13)),
    Row("AdamW", network, compiled("AdamW", 0.01, weight_decay=0.1), rows(13)),
    Row("weight constraint", constrained, sgd, rows(13)),
    Row("embedding", embedding, compiled("Adam", 0.05), ids),
    Row("sync BatchNormalization", normalized, sgd, rows(18), compile_more=SYNC),
    Row("float16 overflow on one replica", mixed, loss_scaled, one_overflow, rtol=1e-3),
    Row("learning-rate schedule", network, decayed, rows(13)),
    Row("frozen layer", frozen, sgd, rows(13)),
    Row("string lookup", string_lookup, sgd, strings, 4),
]
