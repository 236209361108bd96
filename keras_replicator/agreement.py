"""What workers agree on between two calls of the compiled loop, whatever callbacks did on each."""

import keras
import numpy as np

from keras_replicator import compat, workers
from keras_replicator.alignment import align
from keras_replicator.data.fingerprint import differ

_KEEPS_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.TensorBoard,
)


class Agreement:
    """Keeps the workers of a job together; on one worker it does nothing.

    Callbacks may decide by what only their worker knows: a clock, other validation rows, a file.
    Then anybody's wish to stop counts for all; learning rates, weights and history are the chief's.

    Args:
        engine: The engine.
        optimizers: Optimizers whose learning rates callbacks may set.
        callbacks: The callbacks of a fit.
    """

    def __init__(self, engine, optimizers=(), callbacks=()):
        self._engine = engine
        may_change = not all(map(_keeps_weights, callbacks))
        self._may_change = engine.num_workers > 1 and engine.agree(0, may_change)[1]
        self._marks = ()
        inner = [getattr(optimizer, "inner_optimizer", optimizer) for optimizer in optimizers]
        # A schedule is computed from the steps, and so is the same everywhere.
        self._optimizers = [o for o in inner if compat.schedule_of(o) is None]

    @property
    def is_of_one(self):
        """Whether there is nobody to agree with."""
        return self._engine.num_workers == 1

    def noted(self, marks):
        """Remembers the marks of what a call has read."""
        self._marks = marks

    def on_call(self, steps, stop):
        """Returns `(the chief's steps, whether any worker wants to stop)`; every worker calls it.

        Raises:
            keras_replicator.workers.WorkersDisagreeError: When the workers have read different
                rows.
        """
        engine = self._engine
        if self.is_of_one:
            return steps, stop
        rates = [float(keras.ops.convert_to_numpy(o.learning_rate)) for o in self._optimizers]
        table = engine.table([steps, stop, *rates, *self._marks])
        self._take_rates(rates, table[0, 2 : 2 + len(rates)])
        self._compare(table[:, 2 + len(rates) :])
        self._marks = ()
        return int(table[0, 0]), bool(table[:, 1].any())

    def _take_rates(self, own, chief):
        for optimizer, rate, value in zip(self._optimizers, own, chief):
            if rate != value:
                with self._engine.scope():
                    optimizer.learning_rate = value

    def _compare(self, marks):
        for worker, theirs in enumerate(marks):
            if differ(marks[0].tolist(), theirs.tolist()):
                raise workers.WorkersDisagreeError(
                    f"Worker {worker} reads other rows than worker 0 (the chief), so that some "
                    "would be lost and others used twice. Every worker must read the same batches "
                    "in the same order: give `shuffle` and what else is random a seed, and let "
                    "files be read in order (deterministic=True). Or pass a function of a "
                    "tf.distribute.InputContext, which gives each worker batches of its own. This "
                    f"is worker {self._engine.worker}."
                )

    def align(self, host):
        """Gives every worker the chief's weights and optimizer state, where a callback differed."""
        if self._may_change:
            optimizer = getattr(host, "optimizer", None)
            align(self._engine, host.weights + list(getattr(optimizer, "variables", ())))

    def share_history(self, history):
        """Gives every worker the chief's history, in place."""
        if self.is_of_one:
            return
        numbers = {name: values for name, values in history.items() if _are_numbers(values)}
        chief = workers.exchange("history", compat.plain_numbers(numbers), self._engine)[0]
        if self._engine.worker != 0:
            others = {name: values for name, values in history.items() if name not in numbers}
            history.clear()
            history.update({**chief, **others})


def _are_numbers(values):
    return all(np.ndim(value) == 0 and not isinstance(value, (str, bytes)) for value in values)


def _keeps_weights(callback):
    """Whether a callback changes no weights, as Keras' own and those of this package."""
    kind = type(callback)
    return kind in _KEEPS_WEIGHTS or kind.__module__.startswith("keras_replicator.callbacks")
