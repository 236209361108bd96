"""The variables of a run as NumPy arrays, and back again.

What belongs to all replicas alike (weights, slots, seeds, statistics) is stored once. What each
replica holds a part of (metric sums, accumulated gradients) is stored per replica: the same number
of replicas gets its own parts back, another number gets their sum.
"""

import numpy as np

from keras_replicator import compat
from keras_replicator.checkpoints import CheckpointError

_WINDOW_ROWS = "window/rows"  # counted alike on all replicas


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
        for number, metric in enumerate(compat.leaf_metrics(self._host)):
            found.update({f"metric/{number}/{i}": v for i, v in enumerate(metric.variables)})
        if window is not None and window.rows is not None:
            rows, *gradients = window.variables()
            found[_WINDOW_ROWS] = rows
            found.update({f"window/{i}": v for i, v in enumerate(gradients)})
        return found

    def holds_all(self, tensors):
        """Whether every variable of the tensors' run exists here already."""
        own = self.shared()
        written = {name for name in tensors if name.startswith(("model/", "optimizer/", "seed/"))}
        return set(own) == written

    def seeds(self):
        """Returns the states of random streams, as arrays by name."""
        return {
            name: np.array(compat.first_copy(variable))
            for name, variable in self.shared().items()
            if name.startswith("seed/")
        }

    def restore_seeds(self, seeds):
        """Sets random streams back to what `seeds` returned."""
        shared = self.shared()
        with self._engine.cross_replica():
            for name, value in seeds.items():
                shared[name].assign(value)

    def paths(self):
        """Returns `{name: path of the variable}`, for people."""
        return {name: variable.path for name, variable in self.shared().items()}

    def collect(self, window, log_totals):
        """Returns all tensors as NumPy arrays, equal on every worker.

        Args:
            window: The `GradientWindow` where it is open, else None.
            log_totals: Sums of a custom step's logs on this worker.
        """
        tensors = {name: np.array(compat.first_copy(v)) for name, v in self.shared().items()}
        parts = {}
        for name, variable in self.partial(window).items():
            copies = [copy.numpy() for copy in compat.replica_copies(variable)]
            stacked = np.zeros((self._engine.num_replicas, *copies[0].shape), copies[0].dtype)
            first = self._engine.shard.first
            stacked[first : first + len(copies)] = copies
            parts[name] = stacked
        parts.update({f"log/{name}": total for name, total in log_totals.items()})
        dtypes = {name: array.dtype for name, array in parts.items()}
        for name, array in self._engine.sum_parts(parts).items():
            tensors[name] = array.astype(dtypes[name])
        return tensors

    def check(self, tensors, in_mid_epoch=False):
        """Finds out whether tensors fit, before anything is changed.

        Args:
            tensors: Dict of NumPy arrays.
            in_mid_epoch: Whether metrics are needed, too; a new epoch resets them.

        Raises:
            CheckpointError: When a tensor is missing or has another shape.
        """
        wanted = {name: (v.path, tuple(v.shape)) for name, v in self.shared().items()}
        found = {name: tuple(tensors[name].shape) for name in tensors}
        if in_mid_epoch:
            for name, variable in self.partial(None).items():
                wanted[name] = (variable.path, tuple(variable.shape))
                if name in found:
                    found[name] = found[name][1:]
        for name, (path, shape) in wanted.items():
            if found.get(name) != shape:
                have = f"has shape {found[name]}" if name in found else "is missing"
                raise CheckpointError(
                    f"The checkpoint does not fit: {name} ('{path}', shape {shape}) {have} in it. "
                    "Build and compile the model as it was when the checkpoint was written. "
                    "Nothing was restored."
                )

    def restore(self, tensors, window, logs):
        """Sets every variable from NumPy arrays that fit.

        Args:
            tensors: Dict of NumPy arrays.
            window: The `GradientWindow`, or None.
            logs: The `StepLogs` of a custom step, or None.
        """
        with self._engine.cross_replica():
            for name, variable in self.shared().items():
                variable.assign(tensors[name])
        for name, variable in self.partial(window).items():
            if name in tensors and tensors[name].shape[1:] == tuple(variable.shape):
                self._restore_parts(name, variable, tensors[name])
            elif name.startswith("window/"):
                for copy in compat.replica_copies(variable):
                    copy.assign(np.zeros(copy.shape))
        if logs is not None:
            logs.restore(
                {n[len("log/") :]: t for n, t in tensors.items() if n.startswith("log/")},
                self._engine.shard.first == 0,
            )

    def _restore_parts(self, name, variable, parts):
        copies, first = compat.replica_copies(variable), self._engine.shard.first
        if parts.shape[0] == self._engine.num_replicas:
            for copy, part in zip(copies, parts[first : first + len(copies)]):
                copy.assign(part)
            return
        # Accumulated gradients add up, whatever readers of their variable see.
        is_equal = name == _WINDOW_ROWS or (
            not name.startswith("window/") and compat.reads_first_replica(variable)
        )
        total = parts[0] if is_equal else parts.sum(axis=0)
        for number, copy in enumerate(copies):
            mine = is_equal or first + number == 0
            copy.assign(total.astype(parts.dtype) if mine else np.zeros_like(total))
