"""Random rows that fit a model, for verifying one without its data."""

import keras
import numpy as np

from keras_replicator import compat
from keras_replicator.verify.report import VerifyError

# Steps of a sequence and pixels of an image whose size the model leaves open.
_OPEN_SIZE = 8


def rows_for(model, loss, rows, seed=0):
    """Returns `(x, y)` for a built Keras model.

    Inputs are normal numbers, or integers below the smallest embedding; targets are normal numbers,
    or classes where the loss takes classes.

    Args:
        model: A functional or Sequential model, whose inputs are known.
        loss: What `compile` was given as the loss.
        rows: Number of rows.
        seed: Seed.

    Raises:
        VerifyError: When the model does not tell what it takes.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise VerifyError(
            f"The model '{model.name}' does not say what it takes, so rows cannot be made up. Give "
            "some: keras-replicator verify module:build --data module:function, where the function "
            "returns (x, y) or a tf.data.Dataset."
        )
    generator = np.random.default_rng(seed)
    sizes = [
        layer.input_dim
        for layer in compat.flatten_layers(model)
        if isinstance(layer, keras.layers.Embedding)
    ]
    most = min(sizes, default=2)

    def make_input(tensor):
        shape = (rows, *(size or _OPEN_SIZE for size in tensor.shape[1:]))
        if tensor.dtype == "string":
            raise VerifyError(
                f"The model '{model.name}' takes strings, which cannot be made up. Give rows by "
                "--data module:function."
            )
        if tensor.dtype.startswith(("int", "uint")):
            return generator.integers(0, most, shape).astype(tensor.dtype)
        return generator.normal(size=shape).astype("float32")

    def make_target(tensor):
        shape = (rows, *(size or _OPEN_SIZE for size in tensor.shape[1:]))
        name = getattr(loss, "name", loss if isinstance(loss, str) else "") or ""
        if "sparse" in name:
            return generator.integers(0, shape[-1], shape[:-1])
        if "categorical" in name:
            return np.eye(shape[-1], dtype="float32")[generator.integers(0, shape[-1], shape[:-1])]
        if "binary" in name or "hinge" in name:
            return generator.integers(0, 2, shape).astype("float32")
        return generator.normal(size=shape).astype("float32")

    x = keras.tree.map_structure(make_input, _structure(model, "inputs"))
    return x, keras.tree.map_structure(make_target, _structure(model, "outputs"))


def _structure(model, name):
    tensors = getattr(model, name)
    return tensors[0] if len(tensors) == 1 else tensors
