"""What is trained: small models that Python holds back, and large ones that arithmetic does.

    case = CASES["mlp"]
    model, (x, y) = case.build(), case.make_data()

Data are synthetic arrays: nothing is downloaded, and reading them is never the difference.
"""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data and how long it is measured.

    Args:
        name: Its name on the command line.
        build: Function that returns an uncompiled `keras.Model` with logits as output.
        make_rows: Function of a number of rows that returns the inputs.
        classes: Number of classes of the integer targets.
        batch_size: Rows of a global batch.
        steps: Steps of an epoch.
        steps_per_call: Steps that one call of a hand-written loop runs.
        replicas: Numbers of replicas for which it is measured.
        evaluates: Whether evaluate and predict are measured, too.
    """

    name: str
    build: Callable
    make_rows: Callable
    batch_size: int
    steps: int
    classes: int = CLASSES
    steps_per_call: int = 20
    replicas: tuple = (1, 2, 4, 8)
    evaluates: bool = False

    def make_data(self, steps=None):
        """Returns `(x, y)` for an epoch."""
        rows = self.batch_size * (steps or self.steps)
        return self.make_rows(rows), np.random.default_rng(1).integers(0, self.classes, rows)

    def make_loss(self):
        """Returns the loss, one value per row."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _floats(*shape):
    return lambda rows: np.random.default_rng(0).normal(size=(rows, *shape)).astype("float32")


def _tokens(vocabulary, length):
    return lambda rows: np.random.default_rng(0).integers(0, vocabulary, (rows, length))


def dense(*sizes):
    """A multilayer perceptron of these sizes, the input's included."""
    hidden = [layers.Dense(size, activation="relu") for size in sizes[1:-1]]
    return keras.Sequential([keras.Input((sizes[0],)), *hidden, layers.Dense(sizes[-1])])


def resnet20():
    """The CIFAR network of He et al. (arXiv 1512.03385, section 4.2), about 270,000 weights."""
    inputs = keras.Input((32, 32, 3))
    x = _normalised(inputs, 16)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            x = _residual(x, filters, strides if block == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def _normalised(x, filters, strides=1, activation="relu"):
    x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    return x if activation is None else layers.Activation(activation)(x)


def _residual(x, filters, strides):
    y = _normalised(_normalised(x, filters, strides), filters, activation=None)
    if strides > 1:
        # Option A of the paper: no parameters, the new channels are zero.
        x = layers.AveragePooling2D(1, strides)(x)
        x = layers.Concatenate()([x, layers.Rescaling(0.0)(x)])
    return layers.Activation("relu")(layers.Add()([x, y]))


def resnet50():
    """ResNet-50 at 224 x 224, as in keras.applications."""
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def transformer(vocabulary=1000, length=64, width=64, heads=4):
    """One encoder block over tokens."""
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(inputs)
    attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
    x = layers.LayerNormalization()(x + attended)
    y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
    x = layers.LayerNormalization()(x + y)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


def embedding(vocabulary=20_000, length=32, width=32):
    """A large table of which a batch touches little: sparse gradients."""
    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            layers.Embedding(vocabulary, width),
            layers.GlobalAveragePooling1D(),
            layers.Dense(CLASSES),
        ]
    )


def many_variables(count=300):
    """`count` variables, so that tracing and the number of reductions count."""
    hidden = [layers.Dense(8, activation="relu") for _ in range(count // 2 - 1)]
    return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(CLASSES)])


_ALL = (
    Case("small_mlp", lambda: dense(8, 16, CLASSES), _floats(8), 32, 2000, evaluates=True),
    Case("mlp", lambda: dense(784, 128, CLASSES), _floats(784), 128, 480, evaluates=True),
    Case("resnet20", resnet20, _floats(32, 32, 3), 64, 20),
    Case("transformer", transformer, _tokens(1000, 64), 32, 60),
    Case("embedding", embedding, _tokens(20_000, 32), 64, 200),
    Case(
        "resnet50",
        resnet50,
        _floats(224, 224, 3),
        batch_size=8,
        steps=4,
        classes=1000,
        steps_per_call=4,
        replicas=(1, 2),
    ),
    Case("many_variables", many_variables, _floats(8), 32, 200, replicas=()),
)
CASES = {case.name: case for case in _ALL}
