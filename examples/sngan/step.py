"""One step of SN-GAN on one replica: five discriminator updates, one generator update.

Written as for one device. What `kr` does: `kr.replica.mean` is a mean that an empty replica may
take, and the optimizers average gradients over replicas, weighted by rows.
"""

import keras
import tensorflow as tf

import keras_replicator as kr


def make_train_step(preset, optimizers):
    """Returns `fn(models, batch) -> logs` for `ReplicatedTrainer(train_step=...)`.

    A row of a batch is a group of `preset.discriminator_updates` images, one for each
    discriminator update of the step: `{"image": [rows, updates, height, width, channels],
    "label": [rows, updates]}`.

    Args:
        preset: a `Preset`.
        optimizers: function without arguments that returns the dict with the optimizers
            "generator" and "discriminator", such as `lambda: trainer.optimizers`.
    """

    def train_step(models, batch):
        losses = [
            update_discriminator(
                models,
                batch["image"][:, number],
                batch["label"][:, number],
                optimizers()["discriminator"],
            )
            for number in range(preset.discriminator_updates)
        ]
        rows = preset.generator_samples * tf.shape(batch["label"])[0]
        generator_loss = update_generator(models, rows, optimizers()["generator"])
        return {
            "discriminator_loss": tf.add_n(losses) / len(losses),
            "generator_loss": generator_loss,
        }

    return train_step


def update_discriminator(models, images, labels, optimizer):
    """Makes one discriminator update and returns the hinge loss.

    Args:
        models: dict with "generator" and "discriminator".
        images: real images `[rows, height, width, channels]`.
        labels: their classes `[rows]`.
        optimizer: the discriminator's optimizer.
    """
    generator, discriminator = models["generator"], models["discriminator"]
    rows = tf.shape(labels)[0]
    latents, fake_labels = generator.latents.draw(rows)
    fakes = generator([latents, fake_labels], training=True)
    everything = [tf.concat([images, fakes], 0), tf.concat([labels, fake_labels], 0)]
    with tf.GradientTape() as tape:
        logits = discriminator(everything, training=True)
        real, fake = logits[:rows], logits[rows:]
        loss = kr.replica.mean(tf.nn.relu(1.0 - real)) + kr.replica.mean(tf.nn.relu(1.0 + fake))
    _apply(optimizer, tape, loss, discriminator)
    return loss


def update_generator(models, rows, optimizer):
    """Makes one generator update and returns its loss.

    Args:
        models: dict with "generator" and "discriminator".
        rows: number of samples on this replica.
        optimizer: the generator's optimizer.
    """
    generator, discriminator = models["generator"], models["discriminator"]
    latents, labels = generator.latents.draw(rows)
    with tf.GradientTape() as tape:
        logits = discriminator([generator([latents, labels], training=True), labels], training=True)
        loss = -kr.replica.mean(logits)
    _apply(optimizer, tape, loss, generator)
    return loss


def predict_step(models, batch):
    """Returns images for `{"latents": [rows, size], "labels": [rows]}`."""
    return models["generator"]([batch["latents"], batch["labels"]], training=False)


def _apply(optimizer, tape, loss, model):
    variables = model.trainable_variables
    optimizer.apply(tape.gradient(loss, variables), variables)


@keras.saving.register_keras_serializable("sngan")
class LinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A constant learning rate that falls linearly to 0 from one update to another.

    Args:
        learning_rate: the rate at the beginning.
        begin: update from which it falls.
        end: update at which it is 0.
    """

    def __init__(self, learning_rate, begin, end):
        self.learning_rate = learning_rate
        self.begin = begin
        self.end = end

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        left = (self.end - step) / (self.end - self.begin)
        return self.learning_rate * keras.ops.clip(left, 0.0, 1.0)

    def get_config(self):
        return {"learning_rate": self.learning_rate, "begin": self.begin, "end": self.end}


def make_optimizers(preset, updates=None):
    """Returns the two Adam optimizers of a preset, for `trainer.compile(optimizer=...)`.

    Args:
        preset: a `Preset`.
        updates: number of generator updates of the run; default, the preset's. The beginning of
            the decay moves in proportion.
    """
    updates = updates or preset.updates
    begin = preset.decay_from * updates // preset.updates
    found = {}
    for name, factor in (("generator", 1), ("discriminator", preset.discriminator_updates)):
        found[name] = keras.optimizers.Adam(
            LinearDecay(preset.learning_rate, begin * factor, updates * factor),
            beta_1=preset.beta_1,
            beta_2=preset.beta_2,
            name=name,
        )
    return found
