"""Steps and models without a mistake: verify must not find one."""

import dataclasses
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_replicator as kr
from tests.helpers import REPOSITORY, network, normal, regression_step, sequences, sequential
from tests.verify.mistakes import apply, data, errors

sys.path.insert(0, str(REPOSITORY / "examples"))


@dataclasses.dataclass(frozen=True)
class Correct:
    """A model and step that are right on any number of replicas.

    Args:
        name: what it is.
        make: function that returns `(model, step, arguments of compile, data)`; the step may be a
            function of the trainer that returns one.
        allowed: causes that the contract allows and that are there.
    """

    name: str
    make: Callable
    allowed: tuple = ()


def sgd(**options):
    return {"optimizer": keras.optimizers.SGD(0.1, **options)}


def plain_step():
    return network, regression_step, sgd(momentum=0.9, global_clipnorm=0.1), data()[:2]


def tokens():
    def step(model, batch):
        x, y, mask = batch
        with tf.GradientTape() as tape:
            per_token = tf.square(y - model(x, training=True))[..., 0]
            loss = kr.replica.mean(per_token, sample_weight=mask, normalize="weights")
        apply(model, tape, loss)
        return {
            "loss": loss,
            "tokens": kr.replica.Sum(tf.reduce_sum(mask)),
            "first": per_token[:, 0],
        }

    x, y = sequences([5, 1, 5, 2, 1, 3, 5, 4] * 3)
    mask = (np.abs(x).sum(-1) > 0).astype("float32")
    return lambda: sequential((5, 2), layers.Dense(1)), step, sgd(), (x, y, mask)


def sums():
    def step(model, batch):
        with tf.GradientTape() as tape:
            per_row = errors(model, batch)
            loss = 0.02 * kr.replica.sum(per_row) + 0.1 * tf.reduce_sum(
                tf.square(model.trainable_variables[0])
            )
        apply(model, tape, loss)
        return {"loss": loss, "total": kr.replica.Sum(tf.reduce_sum(per_row))}

    return network, step, sgd(), data()


def contrastive():
    def step(model, batch):
        x, views = batch[0], batch[0] + 0.1 * batch[1]
        with tf.GradientTape() as tape:
            first, second = (tf.math.l2_normalize(model(v, training=True), 1) for v in (x, views))
            candidates = kr.replica.all_gather(second, axis=0)
            begin = kr.replica.replica_id() * kr.replica.global_rows() // kr.replica.num_replicas()
            labels = begin + tf.range(tf.shape(first)[0])
            logits = tf.matmul(first, candidates, transpose_b=True) / 0.5
            loss = kr.replica.mean(
                keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            )
        apply(model, tape, loss)
        return {"loss": loss}

    return lambda: network(outputs=3), step, sgd(), data()[:2]


def statistics():
    """A weight that follows the data, reduced over replicas by hand and by the trainer."""
    from tests.verify.mistakes import Tracking

    def step(model, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(errors(model, batch))
        apply(model, tape, loss)
        largest = kr.replica.all_max(tf.reduce_max(tf.abs(batch[0])))
        model.largest.assign(tf.maximum(model.largest, largest))
        model.seen.assign(model.seen + kr.replica.global_rows())
        return {"loss": loss, "largest": model.largest}

    return Tracking, step, sgd(), data()


def two_models():
    """A GAN whose step asks the trainer for its optimizers."""

    def build():
        return {
            "generator": sequential((2,), layers.Dense(8, "tanh"), layers.Dense(3)),
            "critic": network(),
        }

    def update(trainer, models, name, loss_of):
        variables = models[name].trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of()
        trainer.optimizers[name].apply(tape.gradient(loss, variables), variables)
        return loss

    def make_step(trainer):
        def step(models, batch):
            generator, critic = models["generator"], models["critic"]
            real, latents = batch
            critic_loss = update(
                trainer,
                models,
                "critic",
                lambda: (
                    kr.replica.mean(tf.nn.softplus(-critic(real)))
                    + kr.replica.mean(tf.nn.softplus(critic(generator(latents))))
                ),
            )
            generator_loss = update(
                trainer,
                models,
                "generator",
                lambda: kr.replica.mean(tf.nn.softplus(-critic(generator(latents)))),
            )
            return {"critic": critic_loss, "generator": generator_loss}

        return step

    optimizers = {name: keras.optimizers.Adam(0.01) for name in ("generator", "critic")}
    return build, make_step, {"optimizer": optimizers}, (data()[0], normal(24, 2, seed=5))


def subclass():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weights)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return self.compute_metrics(x, y, y_pred, sample_weight=weights)

    return Own, None, {**sgd(), "loss": "mse", "metrics": ["mae"]}, data()


def model_object():
    model = network()
    return (
        model,
        None,
        {**sgd(), "loss": "mse", "metrics": [keras.metrics.AUC()]},
        (
            data()[0],
            (data()[1] > 0).astype("float32"),
        ),
    )


def bias_before_normalization():
    """A bias whose gradient is zero, and Adam, which makes full steps of its rounding."""

    def build():
        return sequential((3,), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1))

    options = {"optimizer": keras.optimizers.Adam(0.05), "loss": "mse", "sync_batch_norm": True}
    return build, None, options, data()[:2]


def quickstart():
    import quickstart as example

    images = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 1)).astype("uint8")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {**sgd(momentum=0.9, nesterov=True), "loss": loss, "metrics": ["accuracy"]}
    return lambda: example.build_model((8, 8, 1), 10), None, options, (images, np.arange(24) % 10)


def sngan():
    from sngan.model import build_models
    from sngan.presets import PRESETS
    from sngan.step import make_optimizers, make_train_step

    preset = PRESETS["smoke"]
    shape = (24, preset.discriminator_updates, *preset.image_shape)
    images = np.random.default_rng(0).normal(size=shape).astype("float32")
    labels = np.random.default_rng(1).integers(0, preset.num_classes, shape[:2]).astype("int32")

    def make_step(trainer):
        return make_train_step(preset, lambda: trainer.optimizers)

    options = {"optimizer": make_optimizers(preset, 10)}
    return (
        lambda: build_models(preset, 0),
        make_step,
        options,
        ({"image": images, "label": labels},),
    )


def resnet20():
    from resnet50.model import build_model
    from resnet50.recipe import SmoothedCrossentropy

    images = np.random.default_rng(0).normal(size=(24, 32, 32, 1)).astype("float32")
    options = {**sgd(momentum=0.9, nesterov=True), "loss": SmoothedCrossentropy(0.1)}
    data = images, np.arange(24) % 10
    return lambda: build_model("resnet20", (32, 32, 1), 10), None, options, data


def d4pg():
    import types

    from d4pg.config import PRESETS
    from d4pg.learner import make_optimizers
    from d4pg.networks import build_models
    from d4pg.update import make_update

    config, spec = PRESETS["smoke"], types.SimpleNamespace(observation_shape=(3,), action_size=2)

    def make_step(trainer):
        update = make_update(config, lambda: trainer.optimizers)
        return lambda models, batch: update(models, batch)[1]

    rows = {
        "observation": normal(24, 3),
        "action": np.tanh(normal(24, 2, seed=1)),
        "reward": normal(24, seed=2),
        "discount": np.full(24, 0.9, "float32"),
        "next_observation": normal(24, 3, seed=3),
        "weight": np.ones(24, "float32"),
    }
    options = {"optimizer": make_optimizers(config)}
    return lambda: build_models(config, spec, 0), make_step, options, (rows,)


CORRECT = [
    Correct("plain step", plain_step),
    Correct("tokens", tokens),
    Correct("sums", sums),
    Correct("contrastive", contrastive),
    Correct("statistics", statistics),
    Correct("two models", two_models),
    Correct("subclass", subclass),
    Correct("model object", model_object),
    Correct("bias before normalization", bias_before_normalization),
    Correct("quickstart", quickstart),
    Correct("sngan", sngan, ("local BatchNormalization", "randomness")),
    Correct("d4pg", d4pg),
    Correct("resnet20", resnet20, ("local BatchNormalization",)),
]
