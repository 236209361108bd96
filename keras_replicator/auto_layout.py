"""`auto_layout`: a layout for models of known layers, as Megatron-LM splits them.

Pairs of Dense layers are split by columns, then by rows, so that one sum over devices serves both;
attention is split by heads; an embedding by its features (Shoeybi et al. 2019, arXiv 1909.08053,
section 3). Everything else has a whole copy on each device. Any layout gives the same numbers;
this one needs few sums.
"""

import re

import keras

from keras_replicator import compat
from keras_replicator.layout import Layout

# What keeps the features of its input apart, so that columns stay where they are.
_ELEMENTWISE = (
    keras.layers.Activation,
    keras.layers.Dropout,
    keras.layers.ELU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ReLU,
)


def auto_layout(model, mesh, axis="model"):
    """Returns a layout that splits Dense pairs, attention heads and embeddings.

    Args:
        model: A built `keras.Model` (or a dict of them), or a function without arguments that
            builds it; nothing is allocated then.
        mesh: Dict of the mesh's axes and sizes, as in `kr.Layout`; with -1 the devices of this
            machine are counted.
        axis: The mesh axis over which weights are split.

    Returns:
        A `Layout` whose rules name variables by their paths.

    Raises:
        ValueError: When the mesh has no such axis, or the model has no weights yet.

    Example:

    >>> model = keras.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(8, name="a"), keras.layers.Dense(4, name="b")]
    ... )
    >>> layout = auto_layout(model, {"batch": 1, "model": 2})
    >>> [layout.of(weight.path, weight.shape) for weight in model.weights]
    [(None, 'model'), ('model',), ('model', None), (None,)]
    """
    layout = Layout(mesh)
    if -1 in layout.mesh.values():
        from keras_replicator.hardware import detect_hardware

        hardware = detect_hardware()
        layout = layout.on(len(hardware.tpus or hardware.gpus or hardware.cpus))
    if axis not in layout.mesh:
        raise ValueError(
            f"auto_layout splits weights over the axis {axis!r}, which the mesh does not have. "
            f"Add it, or name another by `axis=`. Received: mesh={dict(mesh)}"
        )
    if not isinstance(model, (keras.Model, dict)):
        with compat.kept_names(), compat.deferred_variables():
            model = model()
    models = model.values() if isinstance(model, dict) else [model]
    rules = {}
    for one in models:
        if not one.built or not one.weights:
            raise ValueError(
                f"auto_layout needs the shapes of the weights, and '{one.name}' has none yet. "
                "Start the model with keras.Input, or build it. Received: a model without weights"
            )
        rules.update(_rules(one, layout.mesh[axis], axis))
    variables = {re.escape(path).replace(r"\-", "-"): axes for path, axes in rules.items()}
    return Layout(layout.mesh, variables)


def _rules(model, parts, axis):
    """Returns `{path: axes}` of the variables that are split."""
    rules = {}
    columns = None  # features of a Dense whose columns are split, until a Dense takes them
    for layer in _in_order(model):
        taken, columns = columns, None
        if _is_attention(layer):
            rules.update(_attention(layer, parts, axis))
        elif isinstance(layer, keras.layers.Embedding):
            if layer.output_dim % parts == 0:
                rules[layer.embeddings.path] = (None, axis)
        elif isinstance(layer, keras.layers.Dense):
            kernel = layer.kernel
            if taken == kernel.shape[0]:
                rules[kernel.path] = (axis, None)
            elif kernel.shape[1] % parts == 0:
                rules[kernel.path] = (None, axis)
                if layer.use_bias:
                    rules[layer.bias.path] = (axis,)
                columns = None if layer.activation is keras.activations.softmax else kernel.shape[1]
        elif isinstance(layer, _ELEMENTWISE):
            columns = taken
    return rules


def _in_order(layer):
    """Gives layers in the order of the model; those inside of attention not, it goes as a whole."""
    inside = [] if _is_attention(layer) else compat.sublayers(layer)
    if not inside:
        yield layer
    for one in inside:
        yield from _in_order(one)


def _is_attention(layer):
    return isinstance(layer, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention))


def _attention(layer, parts, axis):
    """Splits the heads, which are the last axis but one of what goes in and the first of the rest.

    Where keys and values have fewer heads than the mesh has parts, nothing is split.
    """
    rules = {}
    for weight in layer.weights:
        role, name = weight.path.split("/")[-2:]
        rank = len(weight.shape)
        if role in ("query", "key", "value", "gate") and rank >= 2:
            where = rank - 2
        elif role == "attention_output" and name == "kernel":
            where = 0
        else:
            continue
        if weight.shape[where] % parts:
            return {}
        rules[weight.path] = tuple(axis if number == where else None for number in range(rank))
    return rules
