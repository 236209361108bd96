"""Judges conditional samples during training, over all replicas."""

import keras
import numpy as np

from sngan.data import labelled_images
from sngan.metrics import frechet_distance, inception_score, recognition

CHUNK = 1000  # samples that are in memory at a time


class SampleQuality(keras.callbacks.Callback):
    """Adds numbers about samples to the logs of each epoch.

    * `frechet_distance`: between samples and test images, in features of the classifier;
    * `inception_score`: in classes of the classifier;
    * `recognised`: share of samples that the classifier takes for the class they were drawn for;
    * `recognised_worst_class`: the same, for the class with the smallest share.

    The same latents are used each time, as many for each class as for every other one. Generator
    and classifier run on all replicas, through `trainer.predict`.

    Args:
        trainer: the `kr.ReplicatedTrainer` of the generator.
        judge: the trainer that `train_classifier` returns.
        preset: a `Preset`.
        builder: a prepared `tfds.core.DatasetBuilder`.
        samples: number of samples; rounded up to a multiple of the number of classes.
        batch_size: rows of a global batch of the generator.
        seed: seed of the latents.
    """

    def __init__(self, trainer, judge, preset, builder, samples=5000, batch_size=250, seed=0):
        super().__init__()
        self._trainer, self._judge, self._preset = trainer, judge, preset
        self._batch_size = batch_size
        rows = preset.num_classes * -(-samples // preset.num_classes)
        self._labels = (np.arange(rows) % preset.num_classes).astype("int32")
        random = np.random.default_rng(seed)
        self._latents = random.standard_normal((rows, preset.latent_size)).astype("float32")
        self._real = self._features(self._images(builder, "test", rows))
        self.real_to_real = frechet_distance(
            self._features(self._images(builder, "train", rows)), self._real
        )
        self.shares = None
        self._pictures = None

    def on_epoch_end(self, epoch, logs=None):
        features, logits, self._pictures = [], [], None
        for begin in range(0, len(self._labels), CHUNK):
            images = self.generate(slice(begin, begin + CHUNK))
            outputs = self._judge.predict(images, batch_size=self._batch_size, verbose=0)
            features.append(outputs["features"])
            logits.append(outputs["logits"])
            if self._pictures is None:
                self._pictures = images[:100]
        logits = np.concatenate(logits)
        share, self.shares = recognition(logits, self._labels, self._preset.num_classes)
        logs["frechet_distance"] = frechet_distance(self._real, np.concatenate(features))
        logs["inception_score"] = inception_score(logits)
        logs["recognised"] = share
        logs["recognised_worst_class"] = float(self.shares.min())

    def generate(self, rows):
        """Returns samples in -1 to 1 for a slice of the latents."""
        inputs = {"latents": self._latents[rows], "labels": self._labels[rows]}
        return self._trainer.predict(inputs, batch_size=self._batch_size, verbose=0)

    def pictures(self, epoch=None):
        """Returns up to 100 samples in 0 to 1; with 10 classes, column j shows class j."""
        del epoch
        if self._pictures is None:
            self._pictures = self.generate(slice(0, 100))
        return np.clip((self._pictures + 1) / 2, 0, 1)

    def _images(self, builder, split, rows):
        images = labelled_images(builder, self._preset, split).take(rows).batch(self._batch_size)
        return images.map(lambda image, label: image)

    def _features(self, images):
        return self._judge.predict(images, verbose=0)["features"]
