"""When a run is saved and resumed: requests, preemption, and the thread that writes.

A callback asks for a checkpoint (`trainer.save_checkpoint` in a hook); it is taken at the next
boundary, after every callback has run, so that the state of all of them belongs to the same step.
Workers agree on each one, and the chief writes while training goes on.
"""

import concurrent.futures
import dataclasses
import json
import sys

import keras

from keras_replicator import checkpoints, compat
from keras_replicator.run_state import RunState, callback_states, restore_callbacks

# The exit code of a run that was preempted and saved (EX_TEMPFAIL): start it again.
PREEMPTED = 75


@dataclasses.dataclass
class Resumed:
    """Where a resumed run goes on."""

    epoch: int
    step: int
    total_steps: int
    entries: list
    tensors: dict

    def restore_callbacks(self, callbacks):
        """Gives callbacks the state that they had."""
        restore_callbacks(callbacks, self.entries, self.tensors)


class Saver:
    """Saves and restores one trainer.

    Args:
        session: The `Session`.
    """

    def __init__(self, session):
        self._session = session
        self._callbacks = []
        self._phase = None
        self._requests = {}  # directory -> keep
        self._pending = None  # what was read before the variables existed
        self._position = (0, 0, 0)  # epoch, step of the epoch, steps of the run
        self._writing = None
        self._pool = None
        self._config = None
        self.preempted = False

    # ----------------------------------------------------------------------------------- saving

    def save(self, directory, keep=None):
        """Saves now, or at the next boundary while training."""
        self._requests[str(directory)] = keep
        if not self._session.training:
            self._write_requested(*self._position)
            self.finish()

    def preempt(self):
        """Asks for a checkpoint and the end of the run at the next boundary."""
        self.preempted = True

    def at_step(self, epoch, step, total_steps):
        """Saves what was asked for; returns whether the run must end."""
        for callback in self._callbacks:
            if getattr(callback, "saves_when_preempted", False):
                callback.on_steps_made(total_steps)
        self._agree()
        self._write_requested(epoch, step, total_steps)
        return self.preempted

    def at_epoch_end(self, epoch, total_steps):
        """Saves what was asked for at the end of an epoch."""
        self._agree()
        self._write_requested(epoch + 1, 0, total_steps)
        self.leave_if_preempted()

    def leave_if_preempted(self):
        """Ends a preempted run, saved, with the code that means: start it again."""
        if self.preempted:
            self.finish()
            raise SystemExit(PREEMPTED)

    def finish(self):
        """Waits for the thread that writes, and raises what went wrong there."""
        for callback in self._callbacks if not self._session.training else ():
            if getattr(callback, "saves_when_preempted", False):
                callback.restore_signals()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _agree(self):
        """One worker's signal or clock counts for all."""
        engine = self._session.engine
        if engine.num_workers == 1:
            return
        self.preempted = engine.agree(0, self.preempted)[1]
        wanted = engine.agree(0, bool(self._requests) and self._session.plan.is_chief)[1]
        if not wanted:
            self._requests = {}
        elif not self._requests:
            self._requests = {"": None}  # the chief's clock was due, and it knows the folder

    def _write_requested(self, epoch, step, total_steps):
        self._position = (epoch, step, total_steps)
        requests, self._requests = self._requests, {}
        if self.preempted:
            requests.update(self._preemption_folders())
        if not requests:
            return
        if self._config is None:
            self._config = _model_config(self._session.models.host)
        tensors, state = self._collect(epoch, step, total_steps)
        if not self._session.plan.is_chief:
            return
        self.finish()
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "keras_replicator-checkpoints")
        self._writing = self._pool.submit(_write_all, requests, total_steps, tensors, state)

    def _preemption_folders(self):
        return {
            str(callback.directory): callback.keep
            for callback in self._callbacks
            if getattr(callback, "saves_when_preempted", False)
        }

    def _collect(self, epoch, step, total_steps):
        session, phase = self._session, self._phase
        logs = None if phase is None else phase.logs
        window = None if phase is None else phase.window
        tensors = self._state().collect(window, {} if logs is None else logs.totals())
        entries, arrays = callback_states(self._callbacks)
        tensors.update(arrays)
        history = (
            session.models.host.history.history
            if getattr(session.models.host, "history", None)
            else {}
        )
        return tensors, {
            "epoch": epoch,
            "step": step,
            "total_steps": total_steps,
            "epochs_seen": session.epochs_seen,
            "shuffle_seed": session.shuffle_seed,
            "window": session.window.steps,
            "num_replicas": session.engine.num_replicas,
            "history": compat.plain_numbers(history),
            "callbacks": entries,
            "plan": str(session.plan),
            "model": self._config,
        }

    def _state(self):
        session = self._session
        return RunState(session.models.host, session.optimizers, session.engine)

    # -------------------------------------------------------------------------------- restoring

    def restore(self, directory):
        """Restores what exists now; the rest when a loop has made it."""
        path, tensors, state = checkpoints.read(directory)
        self._pending = (path, tensors, state)
        session = self._session
        if session.models.host.built:
            session.build_optimizer()
        if all(name in tensors for name in self._state().shared()) and _same_count(
            self._state().shared(), tensors
        ):
            self._apply(None)

    def prepare(self, resume, callbacks, phase):
        """Called by `fit` when every variable exists.

        Args:
            resume: None, a directory, or "auto" for that of the Checkpoint callback.
            callbacks: The callbacks of this fit.
            phase: The training `Phase`.

        Returns:
            A `Resumed`, or None.
        """
        self._callbacks, self._phase = callbacks, phase
        self._requests, self.preempted = {}, False
        if self._pending is not None:
            self._apply(phase)
        self._position = (0, 0, 0)
        if resume is None:
            return None
        directory = self._folder_of(resume, callbacks)
        if not checkpoints.complete(directory, verify=False):
            return None
        self._pending = checkpoints.read(directory)
        path, tensors, state = self._pending
        self._apply(phase)
        session = self._session
        session.window.steps = state["window"] % session.window.size
        if session.plan.is_chief:
            where = f"epoch {state['epoch'] + 1}" + (
                f", step {state['step']}" if state["step"] else ""
            )
            print(f"Resumed from {path}: {where}.{_replicas_note(state, session)}", file=sys.stderr)
        self._position = (state["epoch"], state["step"], state["total_steps"])
        return Resumed(*self._position, state["callbacks"], tensors)

    def _apply(self, phase):
        _, tensors, state = self._pending
        self._state().restore(
            tensors, None if phase is None else phase.window, None if phase is None else phase.logs
        )
        session = self._session
        session.epochs_seen = state["epochs_seen"]
        session.shuffle_seed = state["shuffle_seed"]
        self._pending = None

    @staticmethod
    def _folder_of(resume, callbacks):
        if resume != "auto":
            return str(resume)
        for callback in callbacks:
            if getattr(callback, "saves_when_preempted", False):
                return str(callback.directory)
        raise ValueError(
            "`resume='auto'` takes the folder of kr.callbacks.Checkpoint, and there is none among "
            "the callbacks. Add one, or give the folder. Received: resume='auto'"
        )


def _write_all(requests, total_steps, tensors, state):
    for directory, keep in requests.items():
        checkpoints.write(directory, total_steps, tensors, state, keep)


def _same_count(variables, tensors):
    own = ("model/", "optimizer/", "seed/")
    return len(variables) == sum(name.startswith(own) for name in tensors)


def _replicas_note(state, session):
    before, now = state["num_replicas"], session.engine.num_replicas
    if before == now:
        return ""
    return (
        f" It was written on {before} replica(s) and goes on with {now}: weights, optimizers, "
        "statistics, metrics and position are kept; each replica's random numbers are derived anew."
    )


def _model_config(model):
    """The config from which a model can be made anew, or None."""
    try:
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        json.dumps(config)
    except (NotImplementedError, TypeError, ValueError):
        return None
    return config
