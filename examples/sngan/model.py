"""Generator and projection discriminator (Miyato et al. 2018; Miyato & Koyama 2018).

models = build_models(PRESETS["fashion_mnist32"], seed=0)
models["generator"]([latents, labels])         # images in -1 to 1
models["discriminator"]([images, labels])      # one number per row
"""

import keras
from keras import layers

from sngan.spectral import SpectralNormalization

# Glorot's uniform distribution; twice the variance in front of a ReLU, as in the authors' code.
_GLOROT = keras.initializers.VarianceScaling(1.0, mode="fan_avg", distribution="uniform")
_GLOROT_RELU = keras.initializers.VarianceScaling(2.0, mode="fan_avg", distribution="uniform")
_NORMALIZATION = {"momentum": 0.9, "epsilon": 2e-5}


class Latents(layers.Layer):
    """Draws what a generator starts from: latents ~ N(0, 1) and uniform labels.

    Each replica draws numbers of its own, because the random state is a Keras `SeedGenerator`.

    Args:
        size: length of a latent vector.
        num_classes: number of classes.
        seed: an int or None.
    """

    def __init__(self, size, num_classes, seed=None, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        self.num_classes = num_classes
        self.seed_generator = keras.random.SeedGenerator(seed)

    def draw(self, rows):
        """Returns `(latents, labels)` for a number of rows (an int or a scalar tensor)."""
        latents = keras.random.normal((rows, self.size), seed=self.seed_generator)
        labels = keras.random.randint((rows,), 0, self.num_classes, seed=self.seed_generator)
        return latents, labels


class ConditionalBatchNormalization(layers.Layer):
    """BatchNormalization whose scale and offset belong to the class of the row.

    Args:
        num_classes: number of classes.
        **kwargs: arguments of `keras.layers.Layer`.
    """

    def __init__(self, num_classes, **kwargs):
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.normalization = layers.BatchNormalization(center=False, scale=False, **_NORMALIZATION)

    def build(self, inputs_shape, labels_shape):
        channels = inputs_shape[-1]
        self.gamma = layers.Embedding(self.num_classes, channels, embeddings_initializer="ones")
        self.beta = layers.Embedding(self.num_classes, channels, embeddings_initializer="zeros")
        for layer in (self.gamma, self.beta):
            layer.build()
        self.normalization.build(inputs_shape)

    def call(self, inputs, labels, training=False):
        gamma, beta = (
            keras.ops.expand_dims(table(labels), (1, 2)) for table in (self.gamma, self.beta)
        )
        return gamma * self.normalization(inputs, training=training) + beta

    def get_config(self):
        return {**super().get_config(), "num_classes": self.num_classes}


def build_models(preset, seed=None):
    """Returns `{"generator": …, "discriminator": …}` for a preset.

    The generator has an attribute `latents`, the `Latents` layer to draw its inputs with.

    Args:
        preset: a `Preset`.
        seed: seed of the latents, or None.
    """
    generator = build_generator(preset)
    generator.latents = Latents(preset.latent_size, preset.num_classes, seed)
    return {"generator": generator, "discriminator": build_discriminator(preset)}


def build_generator(preset):
    """Returns the model `[latents, labels] -> images`.

    Args:
        preset: a `Preset`.
    """
    latents = keras.Input((preset.latent_size,), name="latents")
    labels = keras.Input((), dtype="int32", name="labels")
    x = layers.Dense(4 * 4 * preset.first_channels, kernel_initializer=_GLOROT)(latents)
    x = layers.Reshape((4, 4, preset.first_channels))(x)
    for channels in preset.generator_channels:
        x = _up_block(x, labels, channels, preset.num_classes)
    x = layers.ReLU()(layers.BatchNormalization(**_NORMALIZATION)(x))
    x = layers.Conv2D(
        preset.image_shape[-1],
        3,
        padding="same",
        activation="tanh",
        kernel_initializer=_GLOROT,
        name="images",
    )(x)
    if x.shape[1:] != preset.image_shape:
        raise ValueError(
            "`generator_channels` needs one entry for each doubling from 4 x 4 to the image. "
            f"Received: generator_channels={preset.generator_channels}, "
            f"image_shape={preset.image_shape}"
        )
    return keras.Model([latents, labels], x, name="generator")


def build_discriminator(preset):
    """Returns the model `[images, labels] -> logits [rows]`.

    Args:
        preset: a `Preset`.
    """
    images = keras.Input(preset.image_shape, name="images")
    labels = keras.Input((), dtype="int32", name="labels")
    x = _first_block(images, preset.first_discriminator_channels)
    for channels in preset.down_channels:
        x = _discriminator_block(x, channels, down=True)
    for channels in preset.flat_channels:
        x = _discriminator_block(x, channels, down=False)
    features = keras.ops.sum(layers.ReLU()(x), axis=(1, 2))
    logits = SpectralNormalization(layers.Dense(1, kernel_initializer=_GLOROT))(features)
    embedded = SpectralNormalization(
        layers.Embedding(
            preset.num_classes, features.shape[-1], embeddings_initializer=_GLOROT, name="classes"
        )
    )(labels)
    # Projection: how well the features agree with the class (arXiv 1802.05637, equation 3).
    logits = keras.ops.squeeze(logits, -1) + keras.ops.sum(embedded * features, axis=-1)
    return keras.Model([images, labels], logits, name="discriminator")


def _convolution(channels, size=3):
    return layers.Conv2D(
        channels,
        size,
        padding="same",
        kernel_initializer=_GLOROT_RELU if size == 3 else _GLOROT,
    )


def _up_block(x, labels, channels, num_classes):
    shortcut = _convolution(channels, 1)(layers.UpSampling2D(2)(x))
    x = layers.ReLU()(ConditionalBatchNormalization(num_classes)(x, labels))
    x = _convolution(channels)(layers.UpSampling2D(2)(x))
    x = layers.ReLU()(ConditionalBatchNormalization(num_classes)(x, labels))
    return _convolution(channels)(x) + shortcut


def _first_block(images, channels):
    x = layers.ReLU()(SpectralNormalization(_convolution(channels))(images))
    x = layers.AveragePooling2D(2)(SpectralNormalization(_convolution(channels))(x))
    shortcut = layers.AveragePooling2D(2)(images)
    return x + SpectralNormalization(_convolution(channels, 1))(shortcut)


def _discriminator_block(x, channels, down):
    shortcut = x
    if down or x.shape[-1] != channels:
        shortcut = SpectralNormalization(_convolution(channels, 1))(x)
    x = SpectralNormalization(_convolution(channels))(layers.ReLU()(x))
    x = SpectralNormalization(_convolution(channels))(layers.ReLU()(x))
    if down:
        x, shortcut = layers.AveragePooling2D(2)(x), layers.AveragePooling2D(2)(shortcut)
    return x + shortcut
