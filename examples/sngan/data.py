"""Images as the authors prepared them: x / 128 - 1 plus U(0, 1/128), no augmentation."""

import tensorflow as tf

SHUFFLE_ROWS = 20_000


def prepare_image(image, image_shape, seed):
    """Returns a float image of the wanted shape in about -1 to 1.

    A larger image is cropped to its central square and resized (bilinear); a smaller one gets a
    border of zeros.

    Args:
        image: uint8 tensor `[height, width, channels]`.
        image_shape: `(height, width, channels)`.
        seed: int64 tensor `[2]`, the seed of the noise.
    """
    height, width, channels = image_shape
    size = tf.shape(image)
    side = tf.minimum(size[0], size[1])
    square = tf.image.resize_with_crop_or_pad(image, side, side)
    image = tf.cond(
        side > height,
        lambda: tf.image.resize(square, (height, width)),
        lambda: tf.cast(tf.image.resize_with_crop_or_pad(image, height, width), tf.float32),
    )
    image = tf.ensure_shape(image, (height, width, channels))
    noise = tf.random.stateless_uniform(image_shape, seed, 0.0, 1 / 128)
    return image / 128 - 1 + noise


def labelled_images(builder, preset, split, seed=0, repeat=False):
    """Returns `(image, label)` rows of a tfds data set.

    Args:
        builder: a prepared `tfds.core.DatasetBuilder`.
        preset: a `Preset`.
        split: "train", "test" or another split; "train" is shuffled.
        seed: seed of the order and of the noise.
        repeat: whether the rows come again and again.
    """
    rows = builder.as_dataset(split=split, as_supervised=True)
    if builder.info.splits[split].num_bytes < 2**30:
        rows = rows.cache()
    if split == "train":
        rows = rows.shuffle(SHUFFLE_ROWS, seed=seed)
    if repeat:
        rows = rows.repeat()
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2)
    return tf.data.Dataset.zip(rows, seeds).map(
        lambda row, seed: (
            prepare_image(row[0], preset.image_shape, seed),
            tf.cast(row[1], tf.int32),
        ),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def training_groups(builder, preset, batch_size, seed=0):
    """Returns endless global batches of groups of images, one image for each discriminator update.

    Args:
        builder: a prepared `tfds.core.DatasetBuilder`.
        preset: a `Preset`.
        batch_size: rows of each discriminator update, over all replicas.
        seed: seed of the order and of the noise.

    Returns:
        `tf.data.Dataset` of `{"image": [rows, updates, height, width, channels], "label": [rows,
        updates]}`.
    """
    rows = labelled_images(builder, preset, "train", seed, repeat=True)
    rows = rows.map(lambda image, label: {"image": image, "label": label})
    return rows.batch(preset.discriminator_updates).batch(batch_size).prefetch(2)
