"""Research methods as custom steps: N replicas train as one device (contract, point 8).

A row of `METHODS` is a step that takes its collectives from `world`: `Replicated` is this package,
and `Alone`, the reference, is what one device with the whole batch writes, run in a plain loop.
15 rows in batches of 6 end with a batch of 3, in which one of four replicas has no row.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_replicator as kr
from tests.helpers import assert_close, cpus, normal, regression, sequential

ROWS, BATCH, EPOCHS = 15, 6, 2
N_CRITIC = 5


class Alone:
    """One device: the replica's rows are all rows."""

    @staticmethod
    def same(nest, axis=None):
        return nest

    all_sum = all_mean = all_gather = same

    @staticmethod
    def first_row():
        return 0


class Replicated:
    all_sum = staticmethod(kr.replica.all_sum)
    all_mean = staticmethod(kr.replica.all_mean)
    all_gather = staticmethod(kr.replica.all_gather)

    @staticmethod
    def first_row():
        """Where this replica's rows begin in the global batch."""
        return kr.replica.replica_id() * kr.replica.global_rows() // kr.replica.num_replicas()


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        build: function of `world` that makes a dict of models.
        step: function of (models, optimizers, batch, world) that updates and returns logs.
        data: dict of arrays, one entry per row.
        optimizers: function that makes a dict of optimizers.
    """

    build: Callable
    step: Callable
    data: dict
    optimizers: Callable = lambda: {"encoder": keras.optimizers.SGD(0.1, momentum=0.9)}


def descend(optimizer, variables, loss_of):
    """One update; returns the loss before it."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


def mlp(inputs, outputs, activation="tanh"):
    return sequential((inputs,), layers.Dense(4, activation=activation), layers.Dense(outputs))


def unit(x):
    return ops.normalize(x, axis=-1)


def cross_entropy(labels, logits):
    return ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)


def follow(teacher, student, momentum=0.8):
    """Moves the teacher's weights towards the student's."""
    for slow, fast in zip(teacher.weights, student.weights, strict=True):
        slow.assign(momentum * slow + (1 - momentum) * fast)


# GANs: the latents of each update come with the batch


def build_gan(world):
    return {"generator": mlp(3, 2), "critic": mlp(2, 1)}


def gan_optimizers():
    return {
        "generator": keras.optimizers.Adam(0.01, beta_1=0.5),
        "critic": keras.optimizers.SGD(0.05, momentum=0.5),
    }


def gan_step(models, optimizers, batch, world):
    """Five updates of the critic on latents of their own, then one of the generator."""
    generator, critic = models["generator"], models["critic"]
    critic_losses = []
    for number in range(N_CRITIC):
        fake = generator(batch["latents"][:, number])
        critic_losses.append(
            descend(
                optimizers["critic"],
                critic.trainable_variables,
                lambda fake=fake: (
                    ops.mean(ops.softplus(-critic(batch["real"])))
                    + ops.mean(ops.softplus(critic(fake)))
                ),
            )
        )
    generator_loss = descend(
        optimizers["generator"],
        generator.trainable_variables,
        lambda: ops.mean(ops.softplus(-critic(generator(batch["latents"][:, N_CRITIC])))),
    )
    return {"critic": sum(critic_losses) / N_CRITIC, "generator": generator_loss}


def penalty_step(models, optimizers, batch, world):
    """Wasserstein losses; the norm of the critic's gradient is pulled to 1."""
    generator, critic = models["generator"], models["critic"]

    def critic_loss():
        fake = tf.stop_gradient(generator(batch["latents"][:, 0]))
        between = batch["real"] + batch["mix"] * (fake - batch["real"])
        with tf.GradientTape() as inner:
            inner.watch(between)
            score = critic(between)
        norm = tf.norm(inner.gradient(score, between), axis=1)
        distance = ops.mean(critic(fake)) - ops.mean(critic(batch["real"]))
        return distance + 10 * ops.mean(ops.square(norm - 1))

    return {
        "critic": descend(optimizers["critic"], critic.trainable_variables, critic_loss),
        "generator": descend(
            optimizers["generator"],
            generator.trainable_variables,
            lambda: -ops.mean(critic(generator(batch["latents"][:, 1]))),
        ),
    }


GAN_DATA = {
    "real": normal(ROWS, 2) + 1,
    "latents": normal(ROWS, N_CRITIC + 1, 3, seed=1),
    "mix": np.random.default_rng(2).uniform(size=(ROWS, 1)).astype("float32"),
}


# Rows that are compared with each other


def build_encoder(world):
    return {"encoder": mlp(3, 4)}


def info_nce_step(models, optimizers, batch, world):
    """Each first view has to find its second view among those of the global batch."""
    encoder = models["encoder"]

    def loss():
        first, second = unit(encoder(batch["first"])), unit(encoder(batch["second"]))
        candidates = world.all_gather(second, axis=0)
        labels = world.first_row() + ops.arange(ops.shape(first)[0])
        return ops.mean(cross_entropy(labels, first @ ops.transpose(candidates) / 0.5))

    return {"loss": descend(optimizers["encoder"], encoder.trainable_variables, loss)}


class Bank(keras.Model):
    """An encoder, its slow copy, and the last keys that this one made."""

    def __init__(self):
        super().__init__()
        self.fast, self.slow = mlp(3, 4), mlp(3, 4)
        self.slow.trainable = False
        self.queue = self.add_weight(
            shape=(8, 4), initializer="ones", trainable=False, name="queue"
        )
        self.built = True


def bank_step(models, optimizers, batch, world):
    """MoCo: the negatives of a query are the keys of earlier batches, newest first."""
    bank = models["encoder"]
    keys = unit(bank.slow(batch["second"]))

    def loss():
        queries = unit(bank.fast(batch["first"]))
        right = ops.sum(queries * keys, axis=1, keepdims=True)
        wrong = queries @ ops.transpose(bank.queue)
        logits = ops.concatenate([right, wrong], axis=1) / 0.5
        return ops.mean(cross_entropy(ops.zeros_like(logits[:, 0], dtype="int32"), logits))

    logs = {"loss": descend(optimizers["encoder"], bank.trainable_variables, loss)}
    follow(bank.slow, bank.fast)
    newest = world.all_gather(keys, axis=0)
    bank.queue.assign(ops.concatenate([newest, bank.queue], axis=0)[:8])
    return logs


VIEWS = {"first": normal(ROWS, 3), "second": normal(ROWS, 3) + 0.1 * normal(ROWS, 3, seed=1)}


# Statistics of the global batch, and a teacher


class GlobalNorm(layers.Layer):
    """Batch normalization by hand; `total` is a sum or a mean over replicas."""

    def __init__(self, total):
        super().__init__()
        self.total = total

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale")
        self.offset = self.add_weight(shape=shape[-1:], initializer="zeros", name="offset")
        options = {"shape": shape[-1:], "trainable": False}
        self.moving_mean = self.add_weight(initializer="zeros", name="mean", **options)
        self.moving_variance = self.add_weight(initializer="ones", name="variance", **options)

    def call(self, x):
        rows, total = self.total((ops.cast(ops.shape(x)[0], x.dtype), ops.sum(x, axis=0)))
        mean = total / rows
        variance = self.total(ops.sum(ops.square(x - mean), axis=0)) / rows
        self.moving_mean.assign(0.9 * self.moving_mean + 0.1 * mean)
        self.moving_variance.assign(0.9 * self.moving_variance + 0.1 * variance)
        return self.scale * (x - mean) / ops.sqrt(variance + 1e-3) + self.offset


def build_normalized(collective, world):
    norm = GlobalNorm(getattr(world, collective))
    return {"encoder": sequential((3,), layers.Dense(4, use_bias=False), norm, layers.Dense(1))}


def regression_step(models, optimizers, batch, world):
    model = models["encoder"]
    return {
        "loss": descend(
            optimizers["encoder"],
            model.trainable_variables,
            lambda: ops.mean(ops.square(batch["y"] - model(batch["x"], training=True))),
        )
    }


def build_teacher(world):
    return {"encoder": mlp(3, 1), "teacher": mlp(3, 1)}


def teacher_step(models, optimizers, batch, world):
    """The student learns the targets and its teacher's opinion; the teacher follows it."""
    student, teacher = models["encoder"], models["teacher"]
    opinion = teacher(batch["x"])

    def loss():
        answer = student(batch["x"], training=True)
        return ops.mean(ops.square(batch["y"] - answer) + 0.5 * ops.square(opinion - answer))

    logs = {"loss": descend(optimizers["encoder"], student.trainable_variables, loss)}
    follow(teacher, student)
    return {**logs, "distance": ops.abs(teacher(batch["x"]) - student(batch["x"]))[:, 0]}


PROBLEM = dict(zip("xy", regression(ROWS), strict=True))

METHODS = {
    "GAN, n_critic 5": Method(build_gan, gan_step, GAN_DATA, gan_optimizers),
    "gradient penalty": Method(build_gan, penalty_step, GAN_DATA, gan_optimizers),
    "InfoNCE": Method(build_encoder, info_nce_step, VIEWS),
    "batch norm by all_sum": Method(
        functools.partial(build_normalized, "all_sum"), regression_step, PROBLEM
    ),
    "batch norm by all_mean": Method(
        functools.partial(build_normalized, "all_mean"), regression_step, PROBLEM
    ),
    "teacher EMA": Method(build_teacher, teacher_step, PROBLEM),
    "memory bank": Method(lambda world: {"encoder": Bank()}, bank_step, VIEWS),
}


@functools.cache
def on_one_device(name):
    """(initial weights, weights, history) of a plain loop; a log is averaged over rows."""
    method = METHODS[name]
    models, optimizers = method.build(Alone), method.optimizers()
    initial = {key: model.get_weights() for key, model in models.items()}
    history = {}
    for _ in range(EPOCHS):
        seen, rows = {}, []
        for start in range(0, ROWS, BATCH):
            batch = {
                key: tf.constant(values[start : start + BATCH])
                for key, values in method.data.items()
            }
            logs = method.step(models, optimizers, batch, Alone)
            rows.append(min(BATCH, ROWS - start))
            for key, value in logs.items():
                seen.setdefault(key, []).append(np.mean(value))
        for key, values in seen.items():
            history.setdefault(key, []).append(np.average(values, weights=rows))
    return initial, {key: model.get_weights() for key, model in models.items()}, history


def cases():
    """(method, replicas); `make test` takes 4 and 2 replicas in turn, the rest is marked slow."""
    for index, name in enumerate(METHODS):
        for replicas in (1, 2, 3, 4):
            marks = () if replicas == (4, 2)[index % 2] else pytest.mark.slow
            yield pytest.param(name, replicas, id=f"{name}-{replicas}", marks=marks)


@pytest.mark.parametrize("name, replicas", list(cases()))
def test_method_trains_as_on_one_device(name, replicas):
    """Weights, statistics and history after six updates, the last of each epoch with 3 rows."""
    method = METHODS[name]
    initial, weights, history = on_one_device(name)

    def step(models, batch):
        return method.step(models, trainer.optimizers, batch, Replicated)

    trainer = kr.ReplicatedTrainer(
        lambda: method.build(Replicated), devices=cpus(replicas), train_step=step
    )
    for key, model in trainer.model.items():
        model.set_weights(initial[key])
    trainer.compile(optimizer=method.optimizers())
    fit = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    actual = trainer.fit(method.data, **fit).history
    assert_close(actual, history, what="history")
    for key, model in trainer.model.items():
        assert_close(model.get_weights(), weights[key], what=key)
    updates = EPOCHS * -(-ROWS // BATCH)
    for key, optimizer in trainer.optimizers.items():
        each = N_CRITIC if (name, key) == ("GAN, n_critic 5", "critic") else 1
        assert int(optimizer.iterations) == each * updates
