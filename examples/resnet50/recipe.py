"""Learning rate, optimizer and loss of a preset."""

import math

import keras
import tensorflow as tf

from resnet50.lars import LARS

REFERENCE_BATCH = 256


@keras.saving.register_keras_serializable("resnet50")
class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises from 0 to a peak in a straight line, then falls.

    Args:
        peak: the highest rate.
        warmup: steps of the rise.
        steps: steps of the whole run.
        decay: "steps", "polynomial" (power 2) or "cosine".
        boundaries: steps at which "steps" multiplies by 0.1.
    """

    def __init__(self, peak, warmup, steps, decay="steps", boundaries=()):
        if decay not in ("steps", "polynomial", "cosine"):
            raise ValueError(
                f"`decay` must be 'steps', 'polynomial' or 'cosine'. Received: decay={decay!r}"
            )
        self.peak = peak
        self.warmup = warmup
        self.steps = steps
        self.decay = decay
        self.boundaries = tuple(boundaries)

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        left = 1.0 - (step - self.warmup) / max(self.steps - self.warmup, 1)
        left = tf.clip_by_value(left, 0.0, 1.0)
        if self.decay == "polynomial":
            factor = left**2
        elif self.decay == "cosine":
            factor = 0.5 * (1.0 - tf.cos(math.pi * left))
        else:
            passed = sum(
                tf.cast(step >= float(boundary), tf.float32) for boundary in self.boundaries
            )
            factor = tf.pow(0.1, tf.cast(passed, tf.float32))
        rise = step / max(self.warmup, 1)
        return self.peak * tf.where(step < self.warmup, rise, factor)

    def get_config(self):
        return {
            "peak": self.peak,
            "warmup": self.warmup,
            "steps": self.steps,
            "decay": self.decay,
            "boundaries": self.boundaries,
        }


def make_schedule(preset, steps_per_epoch):
    """Returns the `Schedule` of a preset.

    With SGD the peak is scaled with the batch (linear scaling rule); with LARS it is given.
    """
    peak = preset.learning_rate
    if preset.optimizer == "sgd":
        peak *= preset.batch_size / REFERENCE_BATCH
    return Schedule(
        peak,
        round(preset.warmup_epochs * steps_per_epoch),
        preset.epochs * steps_per_epoch,
        preset.decay,
        [boundary * steps_per_epoch for boundary in preset.boundaries],
    )


def make_optimizer(preset, steps_per_epoch):
    """Returns the optimizer of a preset; weight decay of SGD is in the model's loss."""
    schedule = make_schedule(preset, steps_per_epoch)
    if preset.optimizer == "lars":
        return LARS(schedule, momentum=0.9, decay=preset.weight_decay)
    return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True)


@keras.saving.register_keras_serializable("resnet50")
class SmoothedCrossentropy(keras.losses.Loss):
    """Cross-entropy of integer labels and logits, with label smoothing.

    Args:
        smoothing: share of the target that all classes divide.
    """

    def __init__(self, smoothing=0.0, name="smoothed_crossentropy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.smoothing = smoothing

    def call(self, labels, logits):
        targets = keras.ops.one_hot(keras.ops.reshape(labels, (-1,)), logits.shape[-1])
        return keras.losses.categorical_crossentropy(
            targets, logits, from_logits=True, label_smoothing=self.smoothing
        )

    def get_config(self):
        return {**super().get_config(), "smoothing": self.smoothing}
