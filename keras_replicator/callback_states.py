"""What callbacks remember, as JSON values and arrays, and back again.

A callback's state is what has changed in its attributes since the fit began: EarlyStopping's best
and patience, ReduceLROnPlateau's cooldown, a counter of the user's. What it was constructed with is
not state: a run that is resumed with `patience=5` has a patience of 5. A callback that knows better
defines `get_state()`, which returns a dict, and `set_state(state)`.

    states = CallbackStates(callbacks)      # before on_train_begin
    states.begun()                          # after it
    entries, tensors = states.collect()
    unmatched = states.restore(entries, tensors)
"""

import os

import keras
import numpy as np

from keras_replicator import compat


class CallbackStates:
    """Collects and restores the state of a fit's callbacks.

    Args:
        callbacks: List of Keras callbacks.
    """

    def __init__(self, callbacks):
        self._callbacks = [
            callback
            for callback in callbacks
            if not isinstance(callback, keras.callbacks.ProgbarLogger)
        ]
        self._before = [_encoded(callback) for callback in self._callbacks]
        self._begun = self._before
        self._appending = []

    def begun(self):
        """Notes what `on_train_begin` has set."""
        for callback, append in self._appending:
            callback.append = append
        self._appending = []
        self._begun = [_encoded(callback) for callback in self._callbacks]

    def collect(self):
        """Returns `(entries, tensors)`: JSON values per callback, and the arrays among them."""
        entries, tensors = [], {}
        for number, callback in enumerate(self._callbacks):
            values = self._changed(number, tensors)
            entry = {"class": type(callback).__name__, "values": values}
            if isinstance(callback, keras.callbacks.CSVLogger):
                entry["lines"] = _count_lines(callback.filename)
            entries.append(entry)
        return entries, tensors

    def _changed(self, number, tensors):
        callback, prefix = self._callbacks[number], f"callback/{number}"
        if hasattr(callback, "get_state"):
            return encode(callback.get_state(), tensors, prefix)
        return {
            name: value
            for name, value in _encoded(callback, tensors, prefix).items()
            if value != self._before[number].get(name) or value != self._begun[number].get(name)
        }

    def restore(self, entries, tensors):
        """Gives callbacks their state, matched by class in order.

        Returns:
            The names of classes in `entries` that no callback of this fit has.
        """
        matched, left = self._match(entries)
        for callback, entry in matched:
            values = {name: decode(value, tensors) for name, value in entry["values"].items()}
            if hasattr(callback, "set_state"):
                callback.set_state(values)
                continue
            for name, value in values.items():
                setattr(callback, name, value)
        return [entry["class"] for entry in left]

    def cut_files(self, entries):
        """Cuts logs back to the checkpoint, and lets their callbacks go on with them.

        To be called before `on_train_begin`, which opens the files.
        """
        for callback, entry in self._match(entries)[0]:
            if isinstance(callback, keras.callbacks.CSVLogger):
                _cut(callback.filename, entry.get("lines", 0))
                self._appending.append((callback, callback.append))
                callback.append = True

    def _match(self, entries):
        left, matched = list(entries), []
        for callback in self._callbacks:
            entry = next((e for e in left if e["class"] == type(callback).__name__), None)
            if entry is not None:
                left.remove(entry)
                matched.append((callback, entry))
        return matched, left


def _encoded(callback, tensors=None, prefix=""):
    """Returns the attributes of a callback that can be written down."""
    values = {}
    for name, value in vars(callback).items():
        if name in compat.CALLBACK_MACHINERY:
            continue
        try:
            own = {}
            values[name] = encode(value, own, f"{prefix}/{name}")
        except TypeError:
            continue
        if tensors is not None:
            tensors.update(own)
        elif own:
            del values[name]  # arrays always count as changed
    return values


def _count_lines(path):
    if not os.path.exists(path):
        return 0
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _cut(path, lines):
    """Shortens a file to a number of lines."""
    if not os.path.exists(path):
        return
    with open(path, "rb+") as file:
        for _ in range(lines):
            file.readline()
        file.truncate(file.tell())


# ------------------------------------------------------------------------------------- values


def encode(value, tensors, path):
    """Returns a JSON value for plain Python values; arrays go to `tensors` under their path.

    Example:

    >>> encode({"best": float("inf"), "seen": (1, 2)}, {}, "callback")
    {'best': {'__float__': 'inf'}, 'seen': {'__tuple__': [1, 2]}}

    Args:
        value: None, a number, a string, an array, or a list, tuple, set or dict of them.
        tensors: Dict that takes the arrays.
        path: Name of the value among the tensors.

    Raises:
        TypeError: For any other value.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return {"__scalar__": [encode(value.item(), tensors, path), value.dtype.name]}
    if isinstance(value, float):
        return value if np.isfinite(value) else {"__float__": str(value)}
    if isinstance(value, np.ndarray) and value.dtype != object:
        tensors[path] = value
        return {"__array__": path}
    if isinstance(value, (list, tuple, set)):
        parts = [encode(part, tensors, f"{path}/{i}") for i, part in enumerate(value)]
        if type(value) is list:
            return parts
        if type(value) in (tuple, set):
            return {f"__{type(value).__name__}__": parts}
    if type(value) is dict:
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: encode(part, tensors, f"{path}/{key}") for key, part in value.items()}
        pairs = [[key, part] for key, part in value.items()]
        return {"__dict__": encode(pairs, tensors, path)}
    raise TypeError(f"{type(value).__name__} is no plain value")


def decode(value, tensors):
    """Returns what `encode` was given."""
    if isinstance(value, list):
        return [decode(part, tensors) for part in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag == "__scalar__":
            return np.dtype(content[1]).type(decode(content[0], tensors))
        if tag == "__float__":
            return float(content)
        if tag == "__array__":
            return np.array(tensors[content])
        if tag in ("__tuple__", "__set__"):
            return {"__tuple__": tuple, "__set__": set}[tag](decode(content, tensors))
        if tag == "__dict__":
            return {key: part for key, part in decode(content, tensors)}
    return {key: decode(part, tensors) for key, part in value.items()}


def plain(values):
    """Returns logs or a history as JSON values; arrays become lists.

    Example:

    >>> plain({"loss": [np.float32(0.5)], "per_class": np.array([1, 2])})
    {'loss': [0.5], 'per_class': [1, 2]}
    """

    def convert(value):
        if hasattr(value, "numpy"):
            value = value.numpy()
        if isinstance(value, (np.ndarray, np.generic)):
            return value.tolist()
        if isinstance(value, dict):
            return {key: convert(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(part) for part in value]
        return value

    return convert(values)
