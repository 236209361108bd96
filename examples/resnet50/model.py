"""ResNet-50 v1.5 as trained on ImageNet, and ResNet-20 for images of 32 x 32.

v1.5: the 3x3 convolution of a bottleneck has the stride, not the first 1x1. Strided convolutions
pad by their size, not by the image's (fixed padding); convolutions have no bias; the last scale
(gamma) of each block starts at 0, so that a block starts as the identity.
"""

import functools

import keras
from keras import layers

_EPSILON = 1e-5


def build_model(name, image_shape, num_classes, weight_decay=1e-4, momentum=0.9):
    """Returns the network `images -> logits`.

    Args:
        name: "resnet50" or "resnet20".
        image_shape: `(height, width, channels)`.
        num_classes: number of logits.
        weight_decay: factor of half the squared weights in the loss, without BatchNormalization.
        momentum: decay of the moving averages of BatchNormalization.

    Raises:
        ValueError: for another name.
    """
    if name not in _BUILDERS:
        raise ValueError(f"`name` must be one of {sorted(_BUILDERS)}. Received: name={name!r}")
    return _BUILDERS[name](image_shape, num_classes, _Parts(weight_decay, momentum))


class _Parts:
    """Convolution, normalization and output, with what all of them share."""

    def __init__(self, weight_decay, momentum):
        # Keras' L2 is factor * sum(w^2); the recipe has half of it.
        self._regularizer = keras.regularizers.L2(weight_decay / 2) if weight_decay else None
        self._momentum = momentum

    def convolution(self, x, filters, size, strides=1):
        padding = "same"
        if strides > 1:
            before = (size - 1) // 2
            x = layers.ZeroPadding2D(((before, size - 1 - before),) * 2)(x)
            padding = "valid"
        return layers.Conv2D(
            filters,
            size,
            strides,
            padding,
            use_bias=False,
            kernel_initializer="variance_scaling",
            kernel_regularizer=self._regularizer,
        )(x)

    def normalization(self, x, relu=True, zero=False):
        x = layers.BatchNormalization(
            momentum=self._momentum,
            epsilon=_EPSILON,
            gamma_initializer="zeros" if zero else "ones",
        )(x)
        return layers.Activation("relu")(x) if relu else x

    def output(self, x, num_classes):
        return layers.Dense(
            num_classes,
            kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
            kernel_regularizer=self._regularizer,
            bias_regularizer=self._regularizer,
            dtype="float32",
            name="logits",
        )(x)


def _block(parts, x, strides, sizes):
    """A residual block of convolutions `(filters, size, strides)`; projects where shapes differ."""
    shortcut = x
    if strides > 1 or x.shape[-1] != sizes[-1][0]:
        shortcut = parts.convolution(x, sizes[-1][0], 1, strides)
        shortcut = parts.normalization(shortcut, relu=False)
    for width, size, stride in sizes[:-1]:
        x = parts.normalization(parts.convolution(x, width, size, stride))
    width, size, stride = sizes[-1]
    x = parts.normalization(parts.convolution(x, width, size, stride), relu=False, zero=True)
    return layers.Activation("relu")(layers.Add()([x, shortcut]))


def _resnet50(image_shape, num_classes, parts):
    images = keras.Input(image_shape, name="images")
    x = parts.normalization(parts.convolution(images, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, "same")(x)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        filters = 64 * 2**stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            sizes = ((filters, 1, 1), (filters, 3, strides), (4 * filters, 1, 1))
            x = _block(parts, x, strides, sizes)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, parts.output(x, num_classes), name="resnet50")


def _small_resnet(image_shape, num_classes, parts, blocks):
    images = keras.Input(image_shape, name="images")
    x = parts.normalization(parts.convolution(images, 16, 3))
    for stage in range(3):
        filters = 16 * 2**stage
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            x = _block(parts, x, strides, ((filters, 3, strides), (filters, 3, 1)))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, parts.output(x, num_classes), name=f"resnet{6 * blocks + 2}")


_BUILDERS = {
    "resnet50": _resnet50,
    "resnet20": functools.partial(_small_resnet, blocks=3),
}
