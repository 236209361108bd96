"""Where a step's gradients, assignments and logs pass by while a job is verified."""

import contextlib
import functools

from keras_replicator import compat, replica
from keras_replicator.steps.logs import StepLogs
from keras_replicator.verify.recorder import Recorder, dense

RECORDER = Recorder()


class Updates:
    """Collects the gradients that optimizers were given after the reduction.

    Attributes:
        active: Whether a run is watched.
        collected: List of `(name, array)` of the current step.
    """

    def __init__(self):
        self.active = False
        self.collected = []

    def note(self, gradients, variables):
        """Notes the gradients of one update."""
        names = [name.split(" (")[0] for name, _ in self.collected]
        for gradient, variable in zip(gradients, variables):
            if gradient is not None:
                number = names.count(variable.path)
                name = f"{variable.path} (update {number + 1})" if number else variable.path
                self.collected.append((name, dense(gradient)))


UPDATES = Updates()


@contextlib.contextmanager
def installed():
    """Context: `UPDATES` and `RECORDER` see what optimizers, variables and logs are given."""
    hooks = [
        (*compat.lookup("apply"), _watch_update),
        (*compat.lookup("apply_scaled"), _watch_update),
        (*compat.lookup("variable_assign"), _watch_assignment),
        (StepLogs, "reduce_locally", _watch_logs),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in hooks]
    for (owner, name, watch), (_, _, original) in zip(hooks, originals):
        setattr(owner, name, _before(original, watch))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _before(original, watch):
    @functools.wraps(original)
    def watched(*args, **kwargs):
        current = replica.current()
        if current is not None and not current.building:
            args = _reread(args)
            watch(current, *args, **kwargs)
        return original(*args, **kwargs)

    return watched


def _reread(args):
    """Gradients may come as an iterator, which is read once only."""
    return tuple(list(arg) if hasattr(arg, "__next__") else arg for arg in args)


def _watch_update(current, optimizer, grads, trainable_variables=None):
    if trainable_variables is None:
        trainable_variables = compat.known_variables(optimizer)
    grads, variables = list(grads), list(trainable_variables)
    if not current.applying:
        RECORDER.note_gradients(grads, variables)
    elif UPDATES.active and current.index == 0 and not hasattr(optimizer, "inner_optimizer"):
        UPDATES.note(grads, variables)


def _watch_assignment(current, variable, value):
    del current
    RECORDER.note_assignment(variable, value)


def _watch_logs(current, step_logs, logs):
    del current, step_logs
    RECORDER.note_logs(logs)
