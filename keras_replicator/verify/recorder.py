"""Notes every operation of a step, on one device or on each replica, with its place in the code.

Steps run eagerly here, so an operation's values are at hand, and so is the line of the user's code
that asked for it. What the package itself computes (collectives, exact losses, updates) is not
noted: a value that comes out of it counts as given.
"""

import contextlib
import dataclasses
import inspect
import linecache
import os
import threading

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat, replica

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_CALLBACKS = os.path.join(os.path.dirname(_PACKAGE), "callbacks")
_HERE = os.path.join(_PACKAGE, "verify")
_STEPS = os.path.join(_PACKAGE, "steps")
_TENSORFLOW = os.path.dirname(os.path.abspath(tf.__file__))
_KERAS = os.path.dirname(os.path.abspath(keras.__file__))
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__))
# What stands between Keras and itself: wrappers around its functions.
_WRAPPERS = {os.path.join(_PACKAGE, "compat.py")} | {
    os.path.join(_STEPS, name)
    for name in ("losses.py", "normalization.py", "randomness.py", "variables.py", "metrics.py")
}
_ENTRANCES = {os.path.join(_PACKAGE, "compat.py")} | {
    os.path.join(_HERE, name) for name in ("draws.py", "hooks.py", "recorder.py")
}
_LARGE = 2**18


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands: a line of the user's code, a layer, or both."""

    file: str = ""
    number: int = 0
    function: str = ""
    layer: str = ""

    def __str__(self):
        line = f"{os.path.relpath(self.file)}:{self.number} in {self.function}" if self.file else ""
        layer = f"layer '{self.layer}'" if self.layer else ""
        return ", ".join(text for text in (line, layer) if text)

    @property
    def line(self):
        """The line of code, stripped."""
        return linecache.getline(self.file, self.number).strip() if self.file else ""


@dataclasses.dataclass
class Operation:
    """One operation: its kind, place, inputs (by identity) and the values of inputs and outputs."""

    kind: str
    place: Place
    inputs: list
    outputs: list
    given: dict  # number of an input that no noted operation made -> its value
    values: list
    handle: int | None = None  # identity of the variable's handle, where one is read


@dataclasses.dataclass
class Sink:
    """A value that has an effect: a differentiated loss, a gradient, an assignment, a log."""

    kind: str  # "loss", "penalty", "gradient", "assign", "log"
    name: str
    place: Place | None
    source: int | None  # identity of its tensor
    value: np.ndarray
    form: str = ""  # of a log: "scalar", "rows", "sum"


class Stream:
    """What one replica did in one step."""

    def __init__(self):
        self.operations = []
        self.sinks = []
        self.made = {}  # identity of a tensor -> (number of the operation, number of the output)
        self.internal = {}  # identity of what the package made -> identities of its inputs
        self.kept = []  # keeps tensors alive, so that identities stay unique
        self.paused = 0


class Recorder:
    """Records the steps that run while it is active.

    Attributes:
        streams: Dict of `Stream`, by replica.
    """

    def __init__(self):
        self.streams = {}
        self.between = set()  # identities of what was made between replicas
        self.active = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def recording(self):
        """Context: everything that runs is noted, in fresh streams."""
        self.streams, self.between, self._kept = {}, set(), []
        compat.add_op_callback(self._note)
        original, original_add = tf.GradientTape.gradient, keras.layers.Layer.add_loss
        recorder = self

        def add_loss(layer, loss):
            stream = recorder.stream()
            for value in tf.nest.flatten(loss) if stream is not None else ():
                if isinstance(value, tf.Tensor):
                    place = find_place(inspect.currentframe())
                    sink = Sink("penalty", layer.name, place, id(value), value_of(value))
                    recorder._sink(stream, sink, value)
            return original_add(layer, loss)

        def gradient(tape, target, sources, *args, **kwargs):
            stream = recorder.stream()
            if stream is None:
                return original(tape, target, sources, *args, **kwargs)
            recorder.note_loss(stream, target, sources)
            stream.paused += 1
            try:
                return original(tape, target, sources, *args, **kwargs)
            finally:
                stream.paused -= 1

        tf.GradientTape.gradient = gradient
        keras.layers.Layer.add_loss = add_loss
        self.active = True
        try:
            yield
        finally:
            self.active = False
            tf.GradientTape.gradient = original
            keras.layers.Layer.add_loss = original_add
            compat.remove_op_callback(self._note)

    def stream(self):
        """The stream of the replica whose step runs in this thread, or None."""
        current = replica.current()
        if not self.active or current is None or current.building:
            return None
        with self._lock:
            return self.streams.setdefault(current.index, Stream())

    # ------------------------------------------------------------------------------ operations

    def _note(self, kind, inputs, attrs, outputs, *unused, **unused_too):
        stream = self.stream()
        if stream is None:
            if self.active and replica.current() is None:
                self.between.update(map(id, outputs))
                self._kept.append(outputs)
            return
        outputs = [output for output in outputs if isinstance(output, tf.Tensor)]
        inputs = [value for value in inputs if isinstance(value, tf.Tensor)]
        if not outputs or not all(hasattr(output, "numpy") for output in outputs):
            return
        stream.kept.append((inputs, outputs))
        place = None
        if not stream.paused and not replica.current().applying:
            place = find_place(inspect.currentframe())
        if place is None:
            # What a gradient was made of is no part of how it was used.
            before = [] if stream.paused else list(map(id, inputs))
            stream.internal.update((id(output), before) for output in outputs)
            return
        given = {
            number: value_of(tensor)
            for number, tensor in enumerate(inputs)
            if id(tensor) not in stream.made
        }
        for number, output in enumerate(outputs):
            stream.made[id(output)] = (len(stream.operations), number)
        kind = kind.decode() if isinstance(kind, bytes) else kind
        reads = kind == "ReadVariableOp" and inputs
        stream.operations.append(
            Operation(
                kind,
                place,
                [id(tensor) for tensor in inputs],
                [id(tensor) for tensor in outputs],
                given,
                [value_of(output) for output in outputs],
                id(inputs[0]) if reads else None,
            )
        )

    # ----------------------------------------------------------------------------------- sinks

    def note_loss(self, stream, target, sources):
        """Notes what is differentiated with respect to variables."""
        sources = tf.nest.flatten(sources)
        if not any(isinstance(source, (keras.Variable, tf.Variable)) for source in sources):
            return
        place = find_place(inspect.currentframe())
        for leaf in tf.nest.flatten(target):
            if isinstance(leaf, tf.Tensor):
                self._sink(stream, Sink("loss", "loss", place, id(leaf), value_of(leaf)), leaf)

    def note_gradients(self, gradients, variables):
        """Notes the gradients that a replica hands to an optimizer."""
        stream = self.stream()
        if stream is None:
            return
        place = find_place(inspect.currentframe())
        for gradient, variable in zip(gradients, variables):
            if gradient is not None:
                sink = Sink("gradient", variable.path, place, id(gradient), dense(gradient))
                self._sink(stream, sink, gradient)

    def note_assignment(self, variable, value):
        """Notes what a step assigns to a variable itself."""
        stream = self.stream()
        if stream is None or replica.current().applying or stream.paused:
            return
        place = find_place(inspect.currentframe())
        if place is not None and not isinstance(value, tf.IndexedSlices):
            array = np.asarray(value_of(value) if isinstance(value, tf.Tensor) else value)
            self._sink(stream, Sink("assign", variable.path, place, id(value), array), value)

    def note_logs(self, logs):
        """Notes what a step returns."""
        stream = self.stream()
        if stream is None or not isinstance(logs, dict):
            return
        for name, value in logs.items():
            tagged = id(value) in replica.current().results
            if tagged or isinstance(value, (keras.metrics.Metric, dict)):
                continue
            form = "scalar"
            if isinstance(value, replica.Sum):
                form, value = "sum", value.value
            array = value_of(value) if isinstance(value, tf.Tensor) else np.asarray(value)
            if form == "scalar" and np.ndim(array):
                form = "rows"
            self._sink(stream, Sink("log", name, None, id(value), array, form), value)

    def _sink(self, stream, sink, tensor):
        stream.kept.append(tensor)
        stream.sinks.append(sink)


def value_of(tensor):
    """Returns a tensor's value (a part of it, where it is large), or None where it has none."""
    if tensor.dtype in (tf.resource, tf.variant):
        return None
    array = tensor.numpy()
    if isinstance(array, np.ndarray) and array.size > _LARGE and array.ndim > 1:
        # The last axis is hardly ever that of the rows.
        array = array[..., :: min(-(-array.size // _LARGE), array.shape[-1])]
    return np.array(array)


def dense(gradient):
    """Returns a gradient as an array, also one that touches some rows only."""
    if not isinstance(gradient, tf.IndexedSlices):
        return np.array(gradient)
    array = np.zeros(gradient.dense_shape.numpy(), gradient.values.numpy().dtype)
    np.add.at(array, gradient.indices.numpy(), gradient.values.numpy())
    return array


def find_place(frame):
    """Returns the `Place` of the code that runs, or None where it is the package's own."""
    layer, in_keras = "", False
    while frame is not None and frame.f_code.co_filename in _ENTRANCES:
        frame = frame.f_back  # hooks of this folder, and the wrappers that lead to them
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_KERAS):
            in_keras = True
            if not layer and code.co_name in ("call", "__call__"):
                layer = _layer_of(frame)
        elif file.startswith((_HERE, _TENSORFLOW)) or _is_library(file):
            pass
        elif file.startswith((_PACKAGE, _CALLBACKS)):
            if not in_keras:
                return None
            if file not in _WRAPPERS:
                return Place(layer=layer) if layer else None
        else:
            return Place(file, frame.f_lineno, code.co_name, layer or _layer_of(frame))
        frame = frame.f_back
    return None


def _is_library(file):
    return file.startswith("<frozen") or (
        file.startswith(_LIBRARY) and "site-packages" not in file and "dist-packages" not in file
    )


def _layer_of(frame):
    owner = frame.f_locals.get("self")
    is_layer = isinstance(owner, keras.layers.Layer) and not isinstance(owner, keras.Model)
    return owner.name if is_layer else ""
