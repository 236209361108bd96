"""Images with the published augmentation: ImageNet from tfds or a folder, and small images.

Training: a random part of 8 to 100 % of the area with an aspect of 3/4 to 4/3 (10 attempts),
resized (bicubic) to 224 x 224, flipped at random. Evaluation: the central 224/256 of the short
side. Both are scaled by the mean and standard deviation of ImageNet's colours.
"""

import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

MEAN = (0.485, 0.456, 0.406)
STANDARD_DEVIATION = (0.229, 0.224, 0.225)
SHUFFLE_ROWS = 16_384
_CROP_PADDING = 32


class Folder:
    """JPEGs in `folder/train/<class>/` and `folder/validation/<class>/` (or `val`).

    Args:
        folder: path.

    Attributes:
        classes: names of the classes, sorted.

    Raises:
        ValueError: when there are no classes, or a split has no JPEGs.
    """

    def __init__(self, folder):
        self._folder = pathlib.Path(folder)
        names = ("train", "validation", "val")
        self._splits = {
            name: self._folder / name for name in names if (self._folder / name).is_dir()
        }
        train = self._splits.get("train", self._folder / "train")
        self.classes = sorted(path.name for path in train.glob("*") if path.is_dir())
        if not self.classes:
            raise ValueError(
                "A folder of JPEGs needs train/<class>/*.jpg and validation/<class>/*.jpg. "
                f"Received: {self._folder}"
            )
        self._files = {name: self._list(path) for name, path in self._splits.items()}

    def _list(self, folder):
        files, labels = [], []
        for label, name in enumerate(self.classes):
            found = sorted(
                str(path)
                for path in (folder / name).glob("*")
                if path.suffix.lower() in (".jpg", ".jpeg")
            )
            files += found
            labels += [label] * len(found)
        if not files:
            raise ValueError(f"There are no JPEGs in {folder}/<class>/. Received: {folder}")
        return files, labels

    def _split(self, name):
        names = ("train",) if name == "train" else ("validation", "val")
        for candidate in names:
            if candidate in self._files:
                return self._files[candidate]
        raise ValueError(f"{self._folder} has no folder {' or '.join(names)}.")

    def count(self, split):
        """Returns the number of images of "train" or "validation"."""
        return len(self._split(split)[0])

    def encoded(self, split, seed=None):
        """Returns rows of `(JPEG bytes, label)`, shuffled anew in each epoch where seeded."""
        files, labels = self._split(split)
        rows = tf.data.Dataset.from_tensor_slices((files, np.array(labels, "int32")))
        if seed is not None:
            rows = rows.shuffle(len(files), seed=seed)
        return rows.map(lambda file, label: (tf.io.read_file(file), label), tf.data.AUTOTUNE)


class FromTfds:
    """A tfds data set of JPEGs with labels, such as `imagenet2012`.

    Args:
        builder: a prepared `tfds.core.DatasetBuilder`.
    """

    def __init__(self, builder):
        self._builder = builder
        self.classes = list(range(builder.info.features["label"].num_classes))

    def count(self, split):
        """Returns the number of images of a split."""
        return self._builder.info.splits[split].num_examples

    def encoded(self, split, seed=None):
        """Returns rows of `(JPEG bytes, label)`, shuffled anew in each epoch where seeded."""
        config = tfds.ReadConfig(shuffle_seed=seed, interleave_cycle_length=16)
        rows = self._builder.as_dataset(
            split=split,
            shuffle_files=seed is not None,
            read_config=config,
            decoders={"image": tfds.decode.SkipDecoding()},
        )
        if seed is not None:
            rows = rows.shuffle(SHUFFLE_ROWS, seed=seed)
        return rows.map(lambda row: (row["image"], tf.cast(row["label"], tf.int32)))


def training_images(source, batch_size, image_size, seed=0):
    """Returns global batches of `(images, labels)`, one pass over the training images.

    Args:
        source: a `Folder` or `FromTfds`.
        batch_size: rows of a global batch.
        image_size: pixels of a side.
        seed: seed of order, crops and flips; every worker reads the same rows.
    """
    rows = source.encoded("train", seed)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)

    def prepare(row, seed):
        image, label = row
        image = distorted(image, image_size, seed)
        return scaled(image), label

    rows = tf.data.Dataset.zip(rows, seeds).map(prepare, tf.data.AUTOTUNE)
    return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def evaluation_images(source, batch_size, image_size, split="validation"):
    """Returns global batches of `(images, labels)` in their own order, without augmentation."""

    def prepare(image, label):
        return scaled(centred(image, image_size)), label

    rows = source.encoded(split).map(prepare, tf.data.AUTOTUNE)
    return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def distorted(encoded, image_size, seed):
    """Returns a random part of a JPEG, `[image_size, image_size, 3]`, in 0 to 255.

    Where no attempt gives a part of the wanted area and aspect, the centre is taken.
    """
    shape = tf.image.extract_jpeg_shape(encoded)
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        shape,
        bounding_boxes=tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed=seed,
        min_object_covered=0.1,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    is_whole = tf.reduce_all(tf.equal(size[:2], shape[:2]))
    image = tf.cond(
        is_whole,
        lambda: centred(encoded, image_size),
        lambda: _part(encoded, begin[0], begin[1], size[0], size[1], image_size),
    )
    return tf.image.stateless_random_flip_left_right(image, seed)


def centred(encoded, image_size):
    """Returns the centre of a JPEG, `[image_size, image_size, 3]`, in 0 to 255."""
    shape = tf.image.extract_jpeg_shape(encoded)
    height, width = shape[0], shape[1]
    short = tf.cast(tf.minimum(height, width), tf.float32)
    side = tf.cast(image_size / (image_size + _CROP_PADDING) * short, tf.int32)
    top, left = (height - side + 1) // 2, (width - side + 1) // 2
    return _part(encoded, top, left, side, side, image_size)


def _part(encoded, top, left, height, width, image_size):
    window = tf.stack([top, left, height, width])
    image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    image = tf.image.resize(image, (image_size, image_size), "bicubic")
    return tf.ensure_shape(image, (image_size, image_size, 3))


def scaled(image):
    """Returns an image of 0 to 255 in units of the standard deviation of each colour."""
    mean, deviation = (tf.constant(values) * 255.0 for values in (MEAN, STANDARD_DEVIATION))
    return (image - mean) / deviation


def small_images(builder, split, batch_size, image_size, seed=None):
    """Returns global batches of a data set of small images of one size.

    Images get a border of zeros to `image_size` and are scaled to -1 to 1; training images (those
    with a seed) are moved by up to 2 pixels and flipped.

    Args:
        builder: a prepared `tfds.core.DatasetBuilder`.
        split: "train" or "test".
        batch_size: rows of a global batch.
        image_size: pixels of a side, at least that of the images.
        seed: seed of order and augmentation, or None for neither.
    """
    rows = builder.as_dataset(split=split, as_supervised=True).cache()

    def bordered(image):
        image = tf.image.resize_with_crop_or_pad(image, image_size, image_size)
        return tf.cast(image, tf.float32) / 127.5 - 1.0

    if seed is None:
        rows = rows.map(lambda image, label: (bordered(image), label), tf.data.AUTOTUNE)
        return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)
    rows = rows.shuffle(rows.cardinality(), seed=seed)
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)

    def prepare(row, seed):
        image, label = row
        image = bordered(image)
        larger = tf.pad(image, ((2, 2), (2, 2), (0, 0)), constant_values=-1.0)
        moved = tf.image.stateless_random_crop(larger, tf.shape(image), seed)
        moved = tf.ensure_shape(moved, image.shape)
        return tf.image.stateless_random_flip_left_right(moved, seed), label

    rows = tf.data.Dataset.zip(rows, seeds).map(prepare, tf.data.AUTOTUNE)
    return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)
