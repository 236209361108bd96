"""What DTensor cannot carry: found before the first update, and named by layer."""

import re

import tensorflow as tf

# How many entries these give depends on the data. DTensor takes the count of one part for it.
_DATA_DEPENDENT = re.compile(
    r"^(Where|Unique\w*|DynamicPartition|ListDiff|NonMaxSuppression\w*|RandomShuffle)$"
)
# How DTensor names an operation that it cannot split.
_OPERATION = re.compile(r"'tf\.(\w+)' op|tf\.(\w+)\(|\"tf\.(\w+)\"")
REFUSED = (
    tf.errors.UnknownError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnimplementedError,
    tf.errors.InternalError,
    tf.errors.NotFoundError,
)
_FIX = (
    "Replace it, or train without a mesh: on replicas (leave out `layout`), each of which holds "
    "the whole model."
)
_UNROLL = (
    "A recurrent layer runs on a mesh with `unroll=True` and a fixed number of steps. Or train "
    "without a mesh: on replicas (leave out `layout`), each of which holds the whole model."
)


class CannotSplitError(ValueError):
    """A layer or an operation of a step has no parts."""


def check(graph, layers):
    """Raises `CannotSplitError` for operations whose results DTensor would get wrong.

    Args:
        graph: The graph of a step.
        layers: The layers that it may run.
    """
    for node in _nodes(graph):
        if node.op == "StridedSlice" and node.attr["new_axis_mask"].i:
            raise CannotSplitError(
                f"{_place(node.name, layers)} slices a tensor and adds an axis to it in one "
                "tf.strided_slice, which crashes DTensor. Use x[:, None] or tf.expand_dims. "
                f"Received: the operation '{node.name}'"
            )
        if _DATA_DEPENDENT.match(node.op):
            raise CannotSplitError(
                f"{_place(node.name, layers)} runs tf.{node.op}, whose number of results depends "
                "on the data; on a mesh each device would count its own part. Use a mask "
                "(tf.where with three arguments) in place of a selection. "
                f"Received: the operation '{node.name}'"
            )


def named(error, graph, layers):
    """Returns a `CannotSplitError` that says which layer DTensor refused, or None.

    Args:
        error: What TensorFlow raised.
        graph: The graph of the step.
        layers: The layers that it may run.
    """
    text = str(error)
    if "DTensor" not in text and "dtensor" not in text and "layout" not in text:
        return None
    operations = [found for match in _OPERATION.findall(text) for found in match if found]
    nodes = [node for node in _nodes(graph) if node.op in operations]
    places = list(dict.fromkeys(_place(node.name, layers) for node in nodes))
    recurrent = any("TensorList" in operation for operation in operations)
    return CannotSplitError(
        f"{' and '.join(places) or 'The step'} cannot be split over a mesh: TensorFlow's DTensor "
        f"has no rule for {', '.join('tf.' + name for name in dict.fromkeys(operations)) or 'it'}. "
        f"{_UNROLL if recurrent else _FIX} Received: {_first_line(text)}"
    )


def _nodes(graph):
    """Gives the nodes of a graph, those of the functions that it calls last."""
    definition = graph.as_graph_def()
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _place(name, layers):
    """Returns the innermost layer in whose scope an operation was made."""
    by_name = {layer.name: layer for layer in layers}
    for part in reversed(name.split("/")[:-1]):
        layer = by_name.get(part) or by_name.get(re.sub(r"_\d+$", "", part))
        if layer is not None:
            return f"The layer '{layer.name}' ({type(layer).__name__})"
    return "The step"


def _first_line(text):
    return text.strip().splitlines()[0][:300]
