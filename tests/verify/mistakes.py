"""Steps and models with a planted mistake, each with the cause that verify must name.

Each `Mistake` is written as users write them, with `# here` at the line that verify must point to.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from keras_replicator.verify import report
from tests.helpers import network, normal, sequential

ROWS = 24
BATCH = 8


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake and its cause.

    Args:
        name: the mistake, in words.
        kind: the kind of cause.
        step: custom step, or None for the built-in one.
        build: function that makes the model.
        compile: arguments of `compile`, or a function that makes them.
        layer: name of the layer that must be named, or "".
        also: other kinds that are there, too.
        code: what holds the marked line, where it is not `step`.
    """

    name: str
    kind: str
    step: Callable | None = None
    build: Callable = network
    compile: Callable = lambda: {"optimizer": keras.optimizers.SGD(0.1)}
    layer: str = ""
    also: tuple = ()
    code: object = None

    @property
    def line(self):
        """The number of the marked line, or None."""
        code = self.code or self.step
        if code is None:
            return None
        lines, first = inspect.getsourcelines(code)
        marked = [number for number, line in enumerate(lines, first) if "# here" in line]
        return marked[0] if marked else None


def data():
    """(x, y, weights): three features, one target, weights of 0 to 3 that differ between halves."""
    x = normal(ROWS, 3)
    weights = np.random.default_rng(4).integers(0, 4, ROWS).astype("float32")
    weights[::BATCH] = 3.0
    return x, x.sum(axis=1, keepdims=True) + normal(ROWS, 1, seed=2), weights


def apply(model, tape, loss):
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)


def errors(model, batch):
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.reduce_mean(tf.square(y - model(x, training=True)), axis=-1)


def built_in(**more):
    return lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **more}


# Sums


def sum_over_rows(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(errors(model, batch)) / BATCH  # here
    apply(model, tape, loss)
    return {"loss": loss}


def sum_beside_a_penalty(model, batch):
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(errors(model, batch))  # here
        loss = total + 0.1 * tf.add_n([tf.reduce_sum(w**2) for w in model.trainable_variables])
    apply(model, tape, loss)
    return {"loss": loss}


def vector_loss(model, batch):
    per_row = errors(model, batch)
    with tf.GradientTape() as tape:
        per_row = errors(model, batch)
        gradients = tape.gradient(per_row, model.trainable_variables)  # here
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": tf.reduce_mean(per_row)}


def average_loss(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(errors(model, batch), global_batch_size=BATCH)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def sum_in_a_log(model, batch):
    with tf.GradientTape() as tape:
        per_row = errors(model, batch)
        loss = tf.reduce_mean(per_row)
    apply(model, tape, loss)
    return {"loss": loss, "total": tf.reduce_sum(per_row)}  # here


class SumModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - self(x, training=True)))  # here
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class AddsSum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * tf.reduce_sum(tf.square(x)))  # here
        return x


def adds_sum():
    return sequential((3,), layers.Dense(2), AddsSum(name="adder"), layers.Dense(1))


# Denominators


def own_weights(model, batch):
    _, _, weights = batch
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(weights * errors(model, batch))
        loss = total / tf.reduce_sum(weights)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def keras_loss_of_weights(model, batch):
    x, y, weights = batch
    mse = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with tf.GradientTape() as tape:
        loss = mse(y, model(x, training=True), weights)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def chosen_rows(model, batch):
    _, _, weights = batch
    with tf.GradientTape() as tape:
        chosen = tf.boolean_mask(errors(model, batch), weights > 1)
        loss = tf.reduce_mean(chosen)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def normalized_weights(model, batch):
    _, _, weights = batch
    weights = weights / tf.reduce_sum(weights)  # here
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * errors(model, batch))
    apply(model, tape, loss)
    return {"loss": loss}


def mean_of_weights(model, batch):
    _, _, weights = batch
    with tf.GradientTape() as tape:
        weighted = tf.reduce_mean(weights * errors(model, batch))
        loss = tf.math.divide_no_nan(weighted, tf.reduce_mean(weights))  # here
    apply(model, tape, loss)
    return {"loss": loss}


def dice(y_true, y_pred):
    shared = 2 * tf.reduce_sum(y_true * y_pred)
    return 1 - shared / (tf.reduce_sum(y_true**2) + tf.reduce_sum(y_pred**2))  # here


# Rows within a replica


def contrastive(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        first = tf.math.l2_normalize(model(x, training=True), axis=1)
        second = tf.math.l2_normalize(model(x + 0.1 * y, training=True), axis=1)
        logits = tf.matmul(first, second, transpose_b=True)  # here
        labels = tf.range(tf.shape(logits)[0])
        per_row = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        loss = kr.replica.mean(per_row)
    apply(model, tape, loss)
    return {"loss": loss}


def pairs_of_rows(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        scores = model(x, training=True)[:, 0]
        gaps = scores[:, None] - scores[None, :]  # here
        signs = tf.sign(y[:, 0][:, None] - y[:, 0][None, :])
        loss = tf.reduce_mean(tf.nn.softplus(-signs * gaps))
    apply(model, tape, loss)
    return {"loss": loss}


def mixed_with_the_row_behind(model, batch):
    x, y, _ = batch
    mixed = 0.5 * x + 0.5 * tf.roll(x, 1, axis=0)  # here
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(mixed, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


def softmax_over_rows(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        scores = model(x, training=True)
        attention = tf.nn.softmax(scores, axis=0)  # here
        loss = tf.reduce_mean(tf.square(attention * y))
    apply(model, tape, loss)
    return {"loss": loss}


def advantages(model, batch):
    x, y, _ = batch
    mean, variance = tf.nn.moments(y, axes=[0])  # here
    y = (y - mean) / tf.sqrt(variance + 1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


class OwnNormalization(layers.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)  # here


def normalizes_itself():
    return sequential((3,), layers.Dense(4, "tanh"), OwnNormalization(name="own"), layers.Dense(1))


def columns_of_length_one(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        scores = tf.math.l2_normalize(model(x, training=True), axis=0)  # here
        loss = tf.reduce_mean(tf.square(y - scores))
    apply(model, tape, loss)
    return {"loss": loss}


def hardest_rows(model, batch):
    with tf.GradientTape() as tape:
        hardest, _ = tf.nn.top_k(errors(model, batch), k=2)  # here
        loss = tf.reduce_mean(hardest)
    apply(model, tape, loss)
    return {"loss": loss}


# Values that were not reduced


def clips_its_own_gradient(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.1)  # here
    model.optimizer.apply(gradients, model.trainable_variables)
    return {"loss": loss}


def root_of_the_mean(model, batch):
    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(errors(model, batch))
        loss = tf.sqrt(mean)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def worst_row(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_max(errors(model, batch))  # here
    apply(model, tape, loss)
    return {"loss": loss}


def maximum_in_a_log(model, batch):
    with tf.GradientTape() as tape:
        per_row = errors(model, batch)
        loss = tf.reduce_mean(per_row)
    apply(model, tape, loss)
    return {"loss": loss, "worst": tf.reduce_max(per_row)}  # here


def updates_by_hand(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    gradients = tape.gradient(loss, model.trainable_variables)
    for gradient, variable in zip(gradients, model.trainable_variables):
        variable.assign(variable - 0.1 * gradient)  # here
    return {"loss": loss}


class Tracking(keras.Model):
    """A network with statistics that its step keeps."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)
        self.largest = self.add_weight(name="largest", initializer="zeros", trainable=False)
        self.seen = self.add_weight(
            name="seen", initializer="zeros", dtype="int32", trainable=False
        )
        self.build((None, 3))

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


def keeps_the_maximum(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    apply(model, tape, loss)
    model.largest.assign(tf.maximum(model.largest, tf.reduce_max(tf.abs(x))))  # here
    return {"loss": loss}


def counts_its_rows(model, batch):
    x, y, _ = batch
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    apply(model, tape, loss)
    model.seen.assign(model.seen + tf.shape(x)[0])  # here
    return {"loss": loss}


class Codebook(layers.Layer):
    def build(self, shape):
        self.totals = self.add_weight(
            name="totals", shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, x):
        self.totals.assign(0.9 * self.totals + 0.1 * tf.reduce_sum(x, axis=0))  # here
        return x


def keeps_sums():
    return sequential((3,), Codebook(name="codebook"), layers.Dense(1))


def follows_the_loss(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    model.optimizer.learning_rate.assign(0.1 * loss)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def reduces_twice(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = kr.replica.all_sum(gradients)
    model.optimizer.apply(gradients, model.trainable_variables)  # here
    return {"loss": loss}


# State of a replica


def scales_the_penalty(model, batch):
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.reduce_sum(w**2) for w in model.trainable_variables])
        penalty = tf.nn.scale_regularization_loss(penalty)  # here
        loss = tf.reduce_mean(errors(model, batch)) + penalty
    apply(model, tape, loss)
    return {"loss": loss}


def weighs_by_its_number(model, batch):
    with tf.GradientTape() as tape:
        factor = 1.0 + 0.5 * kr.replica.replica_id()
        loss = factor * tf.reduce_mean(errors(model, batch))  # here
    apply(model, tape, loss)
    return {"loss": loss}


def divides_by_replicas(model, batch):
    with tf.GradientTape() as tape:
        mean = tf.reduce_mean(errors(model, batch))
        loss = mean / kr.replica.num_replicas()  # here
    apply(model, tape, loss)
    return {"loss": loss}


def only_the_first_assigns(model, batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(errors(model, batch))
    apply(model, tape, loss)
    if kr.replica.replica_id() == 0:
        model.largest.assign(model.largest + 1.0)  # here
    return {"loss": loss}


calls = itertools.count()


def counts_in_python(model, batch):
    with tf.GradientTape() as tape:
        factor = 1.0 + 0.1 * next(calls)
        loss = factor * tf.reduce_mean(errors(model, batch))  # here
    apply(model, tape, loss)
    return {"loss": loss}


def targets_of_its_number(model, batch):
    x, y, _ = batch
    offset = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, "float32")
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y + offset - model(x, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


# Random numbers and normalization


def latents(model, batch):
    x, y, _ = batch
    noise = tf.random.normal(tf.shape(x))  # here
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x + 0.3 * noise, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


def noise_of_numpy(model, batch):
    x, y, _ = batch
    noise = np.random.normal(size=3).astype("float32")  # here
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(x + noise, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


generator = np.random.default_rng(0)


def noise_of_a_generator(model, batch):
    x, y, _ = batch
    noise = generator.normal(size=3).astype("float32")
    noisy = x + noise  # here
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y - model(noisy, training=True)))
    apply(model, tape, loss)
    return {"loss": loss}


def latents_and_own_weights(model, batch):
    x, y, weights = batch
    noise = keras.random.normal(tf.shape(x), seed=1)
    with tf.GradientTape() as tape:
        per_row = tf.reduce_mean(tf.square(y - model(x + 0.3 * noise, training=True)), axis=-1)
        loss = tf.reduce_sum(weights * per_row) / tf.reduce_sum(weights)  # here
    apply(model, tape, loss)
    return {"loss": loss}


def dropped():
    return sequential(
        (3,), layers.Dense(8, "tanh"), layers.Dropout(0.5, name="drop"), layers.Dense(1)
    )


def normalized(*more):
    hidden = layers.Dense(4, use_bias=False)
    normalization = layers.BatchNormalization(momentum=0.8, name="norm")
    return sequential(
        (3,), hidden, normalization, layers.Activation("tanh"), *more, layers.Dense(1)
    )


def normalized_and_dropped():
    return normalized(layers.Dropout(0.5, name="drop"))


MISTAKES = [
    Mistake("sum over rows", report.SUM, sum_over_rows),
    Mistake("sum beside a penalty", report.SUM, sum_beside_a_penalty),
    Mistake("loss with one entry per row", report.SUM, vector_loss),
    Mistake("average loss of tf.nn", report.SUM, average_loss),
    Mistake("sum in a log", report.SUM, sum_in_a_log),
    Mistake("sum in a subclass", report.SUM, build=SumModel, code=SumModel),
    Mistake(
        "add_loss of a sum",
        report.SUM,
        build=adds_sum,
        compile=built_in(),
        layer="adder",
        code=AddsSum,
    ),
    Mistake("its own weights", report.DENOMINATOR, own_weights),
    Mistake("Keras loss with weights", report.DENOMINATOR, keras_loss_of_weights),
    Mistake("mean over chosen rows", report.DENOMINATOR, chosen_rows),
    Mistake("normalized weights", report.DENOMINATOR, normalized_weights),
    Mistake("mean of weights", report.DENOMINATOR, mean_of_weights),
    Mistake(
        "local Dice", report.DENOMINATOR, compile=built_in(loss=kr.local_mean(dice)), code=dice
    ),
    Mistake("contrastive", report.WITHIN_REPLICA, contrastive),
    Mistake("pairs of rows", report.WITHIN_REPLICA, pairs_of_rows),
    Mistake("mixed rows", report.WITHIN_REPLICA, mixed_with_the_row_behind),
    Mistake("softmax over rows", report.WITHIN_REPLICA, softmax_over_rows),
    Mistake("normalized targets", report.WITHIN_REPLICA, advantages),
    Mistake(
        "own normalization",
        report.WITHIN_REPLICA,
        build=normalizes_itself,
        compile=built_in(),
        layer="own",
        code=OwnNormalization,
    ),
    Mistake("columns of length one", report.WITHIN_REPLICA, columns_of_length_one),
    Mistake("hardest rows", report.WITHIN_REPLICA, hardest_rows),
    Mistake("clipped gradient", report.UNREDUCED, clips_its_own_gradient),
    Mistake("root of the mean", report.UNREDUCED, root_of_the_mean),
    Mistake("worst row", report.UNREDUCED, worst_row),
    Mistake("maximum in a log", report.UNREDUCED, maximum_in_a_log),
    Mistake("update by hand", report.UNREDUCED, updates_by_hand),
    Mistake("maximum in a weight", report.UNREDUCED, keeps_the_maximum, build=Tracking),
    Mistake("rows in a counter", report.UNREDUCED, counts_its_rows, build=Tracking),
    Mistake(
        "sums in a layer",
        report.UNREDUCED,
        build=keeps_sums,
        compile=built_in(),
        layer="codebook",
        code=Codebook,
    ),
    Mistake("learning rate that follows the loss", report.UNREDUCED, follows_the_loss),
    Mistake("gradient reduced twice", report.SUM, reduces_twice),
    Mistake("scaled penalty", report.STATE, scales_the_penalty),
    Mistake("number of the replica", report.STATE, weighs_by_its_number),
    Mistake("number of replicas", report.STATE, divides_by_replicas),
    Mistake("only the first assigns", report.STATE, only_the_first_assigns, build=Tracking),
    Mistake("counter in Python", report.STATE, counts_in_python),
    Mistake("offset of the replica", report.STATE, targets_of_its_number),
    Mistake("noise of NumPy", report.RANDOMNESS, noise_of_numpy),
    Mistake("noise of a generator", report.RANDOMNESS, noise_of_a_generator),
    Mistake("latents", report.RANDOMNESS, latents),
    Mistake("dropout", report.RANDOMNESS, build=dropped, compile=built_in(), layer="drop"),
    Mistake(
        "latents and own weights",
        report.DENOMINATOR,
        latents_and_own_weights,
        also=(report.RANDOMNESS,),
    ),
    Mistake(
        "local normalization",
        report.BATCH_NORMALIZATION,
        build=normalized,
        compile=built_in(),
        layer="norm",
    ),
    Mistake(
        "normalization and dropout",
        report.BATCH_NORMALIZATION,
        build=normalized_and_dropped,
        compile=built_in(),
        layer="norm",
        also=(report.RANDOMNESS,),
    ),
]
