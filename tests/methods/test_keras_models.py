"""The model classes of Keras' guides and examples, in our own words, used as they are.

Nothing of this package stands in a class unless its name says so (`Gathered...`): they have their
own `compile`, `train_step(self, data)`, trackers and seed generators. Where a method draws no
random numbers and its rows are independent, plain Keras on one device is the reference.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_replicator as kr
from tests.helpers import assert_close, classification, cpus, normal, regression, sequential

ROWS, BATCH, EPOCHS = 9, 6, 2  # the tail of 3 rows leaves one of four replicas without a row


def mlp(inputs, outputs, activation=None):
    return sequential(
        (inputs,), layers.Dense(4, activation="tanh"), layers.Dense(outputs, activation=activation)
    )


# Guide: what happens in fit


class CustomFit(keras.Model):
    """A functional model with a loss tracker and a metric of its own, without compile's losses."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class CompiledFit(keras.Model):
    """The guide's first class: loss and metrics of compile, the metrics in one dict."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


def build_functional(kind):
    inputs = keras.Input((3,))
    return kind(inputs, mlp(3, 1)(inputs))


# Generative models


class GAN(keras.Model):
    """DCGAN: noisy labels, 1 for generated images."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def latents(self, rows):
        return keras.random.normal((rows, self.latent_dim), seed=self.seed_generator)

    def train_step(self, real_images):
        rows = ops.shape(real_images)[0]
        generated = self.generator(self.latents(rows))
        images = ops.concatenate([generated, real_images], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))

        latents = self.latents(rows)
        misleading = ops.zeros((rows, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading, self.discriminator(self.generator(latents)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def build_gan():
    images = (4, 4, 1)
    discriminator = sequential(
        images,
        layers.Conv2D(2, 3, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    )
    generator = sequential(
        (3,),
        layers.Dense(2 * 2 * 2),
        layers.Reshape((2, 2, 2)),
        layers.Conv2DTranspose(2, 4, strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
    )
    return GAN(discriminator, generator, 3)


def two_optimizers():
    return {
        "d_optimizer": keras.optimizers.Adam(0.01),
        "g_optimizer": keras.optimizers.Adam(0.01),
    }


class WGANGP(keras.Model):
    """Wasserstein GAN with gradient penalty; losses are functions given to compile."""

    def __init__(
        self, discriminator, generator, latent_dim, discriminator_extra_steps=2, gp_weight=10.0
    ):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_steps = discriminator_extra_steps
        self.gp_weight = gp_weight
        self.seed_generator = keras.random.SeedGenerator(7)

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        alpha = keras.random.uniform((batch_size, 1), seed=self.seed_generator)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            prediction = self.discriminator(interpolated, training=True)
        (gradients,) = gp_tape.gradient(prediction, [interpolated])
        norm = tf.sqrt(tf.reduce_sum(tf.square(gradients), axis=1))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            latents = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake_images = self.generator(latents, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                penalty = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + penalty * self.gp_weight
            variables = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables))

        latents = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            generated = self.generator(latents, training=True)
            g_loss = self.g_loss_fn(self.discriminator(generated, training=True))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wasserstein():
    return {
        **two_optimizers(),
        "d_loss_fn": lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        "g_loss_fn": lambda fake_img: -tf.reduce_mean(fake_img),
    }


class Sampling(layers.Layer):
    """Draws z from the distribution that an encoder describes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    """Reconstruction plus KL divergence, three trackers."""

    def __init__(self, encoder, decoder, **options):
        super().__init__(**options)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [
            self.total_loss_tracker,
            self.reconstruction_loss_tracker,
            self.kl_loss_tracker,
        ]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            cross_entropy = keras.losses.binary_crossentropy(data, self.decoder(z))
            reconstruction_loss = ops.mean(cross_entropy)
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        gradients = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def build_vae():
    inputs = keras.Input((5,))
    hidden = layers.Dense(4, activation="relu")(inputs)
    moments = [layers.Dense(2, name=name)(hidden) for name in ("z_mean", "z_log_var")]
    encoder = keras.Model(inputs, [*moments, Sampling()(moments)])
    return VAE(encoder, mlp(2, 5, "sigmoid"))


class ConditionalGAN(keras.Model):
    """Labels are appended to the latents, and to the images as channels."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.gen_loss_tracker = keras.metrics.Mean(name="generator_loss")
        self.disc_loss_tracker = keras.metrics.Mean(name="discriminator_loss")

    @property
    def metrics(self):
        return [self.gen_loss_tracker, self.disc_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, data):
        real_images, one_hot_labels = data
        rows, size, classes = ops.shape(real_images)[0], 4, 3
        label_images = ops.repeat(one_hot_labels[:, :, None, None], repeats=[size * size])
        label_images = ops.reshape(label_images, (-1, size, size, classes))

        def latents():
            noise = keras.random.normal((rows, self.latent_dim), seed=self.seed_generator)
            return ops.concatenate([noise, one_hot_labels], axis=1)

        generated = self.generator(latents())
        fake = ops.concatenate([generated, label_images], -1)
        real = ops.concatenate([real_images, label_images], -1)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(ops.concatenate([fake, real], axis=0))
            d_loss = self.loss_fn(labels, predictions)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))

        inputs = latents()
        with tf.GradientTape() as tape:
            fake = ops.concatenate([self.generator(inputs), label_images], -1)
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self.discriminator(fake))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))

        self.gen_loss_tracker.update_state(g_loss)
        self.disc_loss_tracker.update_state(d_loss)
        return {
            "g_loss": self.gen_loss_tracker.result(),
            "d_loss": self.disc_loss_tracker.result(),
        }


def build_conditional_gan():
    discriminator = sequential(
        (4, 4, 4), layers.Conv2D(2, 3, strides=2), layers.GlobalMaxPooling2D(), layers.Dense(1)
    )
    generator = sequential((5,), layers.Dense(16), layers.Reshape((4, 4, 1)))
    return ConditionalGAN(discriminator, generator, 2)


# Teachers


class Distiller(keras.Model):
    """Knowledge distillation."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student = student
        self.teacher = teacher

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = temperature


class DistillerByStep(Distiller):
    """Has a train step of its own."""

    def __init__(self, student, teacher):
        super().__init__(student, teacher)
        self.student_loss_tracker = keras.metrics.Mean(name="student_loss")
        self.distillation_loss_tracker = keras.metrics.Mean(name="distillation_loss")

    def train_step(self, data):
        x, y = data
        teacher_predictions = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predictions = self.student(x, training=True)
            student_loss = self.student_loss_fn(y, predictions)
            distillation_loss = self.temperature**2 * self.distillation_loss_fn(
                ops.softmax(teacher_predictions / self.temperature, axis=1),
                ops.softmax(predictions / self.temperature, axis=1),
            )
            loss = self.alpha * student_loss + (1 - self.alpha) * distillation_loss
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        self.student_loss_tracker.update_state(student_loss)
        self.distillation_loss_tracker.update_state(distillation_loss)
        for metric in self.metrics:
            if "loss" not in metric.name:
                metric.update_state(y, predictions)
        return {m.name: m.result() for m in self.metrics}


class DistillerByLoss(Distiller):
    """Overrides `compute_loss` and keeps Keras' own train step."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def build_distiller(kind):
    teacher = mlp(3, 3)
    teacher.trainable = False
    return kind(mlp(3, 3), teacher)


def distillation():
    return {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "metrics": [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        "student_loss_fn": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "distillation_loss_fn": keras.losses.KLDivergence(),
        "alpha": 0.3,
        "temperature": 5,
    }


class SelfTraining(keras.Model):
    """Mean teacher: the teacher's weights follow the student's after every update."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student_model = student
        self.teacher_model = teacher
        self.teacher_model.trainable = False
        self.ema = 0.9
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        x, y = data
        opinion = self.teacher_model(x, training=False)
        with tf.GradientTape() as tape:
            y_pred = self.student_model(x, training=True)
            loss = ops.mean(ops.square(y - y_pred)) + ops.mean(ops.square(opinion - y_pred))
        variables = self.student_model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        for slow, fast in zip(self.teacher_model.weights, self.student_model.weights):
            slow.assign(self.ema * slow + (1 - self.ema) * fast)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


# Metric learning


def embedding():
    return sequential((3,), layers.Dense(4, activation="tanh"), layers.Dense(2, use_bias=False))


class Siamese(keras.Model):
    """Triplets: the gradient is that of a vector of losses, so rows are added up, not averaged."""

    def __init__(self, embedding, margin=0.5):
        super().__init__()
        self.embedding = embedding
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        anchor, positive, negative = map(self.embedding, inputs)
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self._compute_loss(data)
            loss = self._reduce(losses)
        weights = self.embedding.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.loss_tracker.update_state(losses)
        return {"loss": self.loss_tracker.result()}

    def _compute_loss(self, data):
        near, far = self(data)
        return ops.maximum(near - far + self.margin, 0.0)

    def _reduce(self, losses):
        return losses

    @property
    def metrics(self):
        return [self.loss_tracker]


class SiameseMean(Siamese):
    def _reduce(self, losses):
        return ops.mean(losses)


class GatheredSiamese(Siamese):
    """The sum over the triplets of the global batch: what `Siamese` does on one device."""

    def _reduce(self, losses):
        return kr.replica.sum(losses)


class SimCLR(keras.Model):
    """Two views of unlabeled rows find each other; a linear probe learns from labeled rows."""

    def __init__(self, augmenter):
        super().__init__()
        self.temperature = 0.5
        self.contrastive_augmenter = augmenter
        self.encoder = mlp(3, 4)
        self.projection_head = mlp(4, 4)
        self.linear_probe = sequential((4,), layers.Dense(3))

    def compile(self, contrastive_optimizer, probe_optimizer, **options):
        super().compile(**options)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def candidates(self, projections):
        """All projections that a row is compared with, and where this replica's begin."""
        return projections, 0

    def contrastive_loss(self, projections_1, projections_2):
        projections_1 = ops.normalize(projections_1, axis=1)
        projections_2 = ops.normalize(projections_2, axis=1)
        losses = []
        for one, two in ((projections_1, projections_2), (projections_2, projections_1)):
            others, begin = self.candidates(two)
            similarities = ops.matmul(one, ops.transpose(others)) / self.temperature
            labels = begin + ops.arange(ops.shape(one)[0])
            self.contrastive_accuracy.update_state(labels, similarities)
            losses.append(
                keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
            )
        return ops.mean((losses[0] + losses[1]) / 2)

    def train_step(self, data):
        images, (labeled_images, labels) = data
        views = [self.contrastive_augmenter(images, training=True) for _ in range(2)]
        with tf.GradientTape() as tape:
            features = [self.encoder(view, training=True) for view in views]
            projections = [self.projection_head(feature, training=True) for feature in features]
            contrastive_loss = self.contrastive_loss(*projections)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(contrastive_loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights))
        self.contrastive_loss_tracker.update_state(contrastive_loss)

        with tf.GradientTape() as tape:
            features = self.encoder(labeled_images, training=False)
            logits = self.linear_probe(features, training=True)
            probe_loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}


class GatheredSimCLR(SimCLR):
    """A row is compared with those of all replicas: one device with the whole batch."""

    def candidates(self, projections):
        begin = kr.replica.replica_id() * kr.replica.global_rows() // kr.replica.num_replicas()
        return kr.replica.all_gather(projections, axis=0), begin


# The table


@dataclasses.dataclass(frozen=True)
class Example:
    """One row: how a model is built and compiled, and on what it trains.

    Attributes:
        build: function that makes the model.
        compile: function that makes the arguments of its compile.
        data: nest of arrays, an element of the data set.
        reference: function that makes the model of one device whose weights and history are equal,
            or None where random numbers or compared rows forbid it.
    """

    build: Callable
    compile: Callable
    data: object
    reference: Callable | None = None


def same(build, *arguments):
    """An example that equals itself on one device."""
    return Example(build, *arguments, reference=build)


def adam():
    return {"optimizer": keras.optimizers.Adam(0.01)}


def momentum():
    return {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}


def gan_loss(from_logits):
    return {
        **two_optimizers(),
        "loss_fn": keras.losses.BinaryCrossentropy(from_logits=from_logits),
    }


def contrastive():
    return {
        "contrastive_optimizer": keras.optimizers.SGD(0.1),
        "probe_optimizer": keras.optimizers.SGD(0.2),
    }


IMAGES = np.abs(normal(ROWS, 4, 4, 1))
CLASSES = classification(ROWS, classes=3)
TRIPLETS = tuple(normal(ROWS, 3, seed=seed) for seed in range(3))
UNLABELED = normal(ROWS, 3, seed=5)

EXAMPLES = {
    "custom fit": same(lambda: build_functional(CustomFit), momentum, regression(ROWS)),
    "custom fit, compiled": same(
        lambda: build_functional(CompiledFit),
        lambda: {**momentum(), "loss": "mse", "metrics": ["mae"]},
        regression(ROWS),
    ),
    "GAN": Example(build_gan, lambda: gan_loss(False), IMAGES),
    "WGAN-GP": Example(lambda: WGANGP(mlp(2, 1), mlp(3, 2), 3), wasserstein, normal(ROWS, 2)),
    "VAE": Example(build_vae, adam, (normal(ROWS, 5) > 0).astype("float32")),
    "conditional GAN": Example(
        build_conditional_gan,
        lambda: gan_loss(True),
        (IMAGES, np.eye(3, dtype="float32")[CLASSES[1]]),
    ),
    "distillation, train_step": same(
        lambda: build_distiller(DistillerByStep), distillation, CLASSES
    ),
    "distillation, compute_loss": same(
        lambda: build_distiller(DistillerByLoss), distillation, CLASSES
    ),
    "teacher EMA": same(lambda: SelfTraining(mlp(3, 1), mlp(3, 1)), momentum, regression(ROWS)),
    "siamese": Example(lambda: Siamese(embedding()), momentum, TRIPLETS),
    "siamese, mean": same(lambda: SiameseMean(embedding()), momentum, TRIPLETS),
    "siamese, gathered": Example(
        lambda: GatheredSiamese(embedding()), momentum, TRIPLETS, lambda: Siamese(embedding())
    ),
    "SimCLR": Example(lambda: SimCLR(layers.GaussianNoise(0.1)), contrastive, (UNLABELED, CLASSES)),
    "SimCLR, gathered": Example(
        lambda: GatheredSimCLR(layers.Identity()),
        contrastive,
        (UNLABELED, CLASSES),
        lambda: SimCLR(layers.Identity()),
    ),
}


def seeded(build):
    """`build` with the same initial weights whenever it is called."""

    def make():
        keras.utils.set_random_seed(0)
        return build()

    return make


def fit(subject, example):
    """Compiles and trains a Keras model or a trainer; returns the history."""
    subject.compile(**example.compile())
    data = tf.data.Dataset.from_tensor_slices(example.data).batch(BATCH)
    return subject.fit(data, epochs=EPOCHS, verbose=0).history


@functools.cache
def on_one_device(name):
    """(weights, history) of plain Keras."""
    example = EXAMPLES[name]
    with tf.device("CPU:0"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras' own at the end of a data set of unknown length
        model = seeded(example.reference)()
        history = fit(model, example)
    return model.get_weights(), history


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_class_of_keras_trains(name, replicas):
    """Four updates: finite logs, weights that moved, and those of one device where promised."""
    example = EXAMPLES[name]
    trainer = kr.ReplicatedTrainer(seeded(example.build), devices=cpus(replicas), seed=0)
    before = [np.array(variable) for variable in trainer.model.trainable_variables]
    history = fit(trainer, example)
    assert history
    for key, values in history.items():
        assert len(values) == EPOCHS, key
        assert np.all(np.isfinite(values)), key
    after = trainer.model.trainable_variables
    assert any(np.any(old != np.array(new)) for old, new in zip(before, after, strict=True))
    if example.reference:
        weights, expected = on_one_device(name)
        assert_close(trainer.model.get_weights(), weights, what="weights")
        assert_close(history, expected, what="history")
