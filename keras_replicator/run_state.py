"""The whole state of a run, as NumPy arrays and JSON values, and back again.

What belongs to all replicas alike (weights, slots, seeds, statistics) is stored once. What each
replica holds a part of (metric sums, accumulated gradients) is stored per replica: the same number
of replicas gets its own parts back, another number gets their sum.
"""

import keras
import numpy as np

from keras_replicator import compat
from keras_replicator.checkpoints import CheckpointError


class RunState:
    """Collects and restores the state of a trainer.

    Args:
        host: The Keras model (or group of models).
        optimizers: Dict of optimizers.
        engine: The engine.
    """

    def __init__(self, host, optimizers, engine):
        self._host = host
        self._optimizers = optimizers
        self._engine = engine

    # ------------------------------------------------------------------------------ whole state

    def shared(self):
        """Returns `{name: variable}` of what is equal on all replicas."""
        found = {f"model/{i}": v for i, v in enumerate(self._host.weights)}
        for name, optimizer in sorted(self._optimizers.items()):
            found.update({f"optimizer/{name}/{i}": v for i, v in enumerate(optimizer.variables)})
        found.update({f"seed/{i}": v for i, v in enumerate(compat.seed_states(self._host))})
        found["seed/global"] = compat.global_seed_state()
        return found

    def partial(self, window):
        """Returns `{name: variable}` of what each replica holds a part of."""
        found = {}
        for metric in sorted(compat.leaf_metrics(self._host), key=lambda metric: metric.name):
            for number, variable in enumerate(metric.variables):
                found[_unique(found, f"metric/{metric.name}/{number}")] = variable
        for number, variable in enumerate(window.variables() if window is not None else []):
            found[f"window/{number}"] = variable
        return found

    def collect(self, window, log_totals):
        """Returns all tensors as NumPy arrays, equal on every worker."""
        tensors = {name: np.array(compat.first_copy(v)) for name, v in self.shared().items()}
        parts = {}
        for name, variable in self.partial(window).items():
            copies = [copy.numpy() for copy in compat.replica_copies(variable)]
            stacked = np.zeros((self._engine.num_replicas, *copies[0].shape), copies[0].dtype)
            first = self._engine.shard.first if len(copies) > 1 or stacked.shape[0] > 1 else 0
            stacked[first : first + len(copies)] = copies
            parts[name] = stacked
        parts.update({f"log/{name}": total for name, total in log_totals.items()})
        dtypes = {name: array.dtype for name, array in parts.items()}
        for name, array in self._engine.sum_over_workers(parts).items():
            tensors[name] = array.astype(dtypes[name])
        return tensors

    def restore(self, tensors, window, logs):
        """Sets every variable from NumPy arrays.

        Raises:
            CheckpointError: When a tensor is missing or has another shape; nothing is changed.
        """
        shared, partial = self.shared(), self.partial(window)
        for name, variable in shared.items():
            found = tensors.get(name)
            if found is None or tuple(found.shape) != tuple(variable.shape):
                have = "is missing" if found is None else f"has shape {tuple(found.shape)}"
                raise CheckpointError(
                    f"The checkpoint does not fit: {name} ('{variable.path}', shape "
                    f"{tuple(variable.shape)}) {have} in it. Build the model and optimizer that "
                    "the checkpoint was written with. Nothing was restored."
                )
        with self._engine.cross_replica():
            for name, variable in shared.items():
                variable.assign(tensors[name])
        for name, variable in partial.items():
            if name in tensors:
                self._restore_parts(variable, tensors[name])
        if logs is not None:
            logs.restore(
                {n[len("log/") :]: t for n, t in tensors.items() if n.startswith("log/")},
                self._engine.worker == 0,
            )

    def _restore_parts(self, variable, parts):
        copies = compat.replica_copies(variable)
        if parts.shape[0] == self._engine.num_replicas:
            first = self._engine.shard.first
            for copy, part in zip(copies, parts[first : first + len(copies)]):
                copy.assign(part)
            return
        total = parts[0] if compat.reads_first_replica(variable) else parts.sum(axis=0)
        for number, copy in enumerate(copies):
            mine = compat.reads_first_replica(variable) or self._engine.shard.first + number == 0
            copy.assign(total.astype(parts.dtype) if mine else np.zeros_like(total))


def _unique(names, name):
    number, unique = 1, name
    while unique in names:
        number += 1
        unique = f"{name}~{number}"
    return unique


# -------------------------------------------------------------------------------- callbacks


def callback_states(callbacks):
    """Returns `(entries, tensors)`: the plain attributes of callbacks, and arrays among them."""
    entries, tensors = [], {}
    for number, callback in enumerate(callbacks):
        values = {}
        for name, value in vars(callback).items():
            if _is_array_list(value):
                for index, array in enumerate(value):
                    tensors[f"callback/{number}/{name}/{index}"] = np.asarray(array)
                values[name] = {"arrays": len(value)}
            elif _is_plain(value):
                values[name] = _to_json(value)
        if isinstance(callback, keras.callbacks.ProgbarLogger):
            values = {}
        entries.append({"class": type(callback).__name__, "values": values})
    return entries, tensors


def restore_callbacks(callbacks, entries, tensors):
    """Gives callbacks their attributes back, matched by class in order."""
    left = list(enumerate(entries))
    for callback in callbacks:
        match = next((e for e in left if e[1]["class"] == type(callback).__name__), None)
        if match is None:
            continue
        left.remove(match)
        number, entry = match
        for name, value in entry["values"].items():
            if isinstance(value, dict) and set(value) == {"arrays"}:
                value = [tensors[f"callback/{number}/{name}/{i}"] for i in range(value["arrays"])]
            else:
                value = _from_json(value)
            setattr(callback, name, value)


def _is_plain(value):
    if isinstance(value, (bool, int, float, str, np.number)) or value is None:
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) for part in value)
    return isinstance(value, dict) and all(
        isinstance(key, str) and _is_plain(part) for key, part in value.items()
    )


def _is_array_list(value):
    return isinstance(value, list) and bool(value) and all(isinstance(v, np.ndarray) for v in value)


def _to_json(value):
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    if isinstance(value, dict):
        return {key: _to_json(part) for key, part in value.items()}
    return value


def _from_json(value):
    if isinstance(value, dict):
        if set(value) == {"float"}:
            return float(value["float"])
        return {key: _from_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return value
