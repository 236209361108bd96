"""When a run is saved and resumed: requests, preemption, and the thread that writes.

A callback asks for a checkpoint (`trainer.save_checkpoint` in a hook); it is taken at the next
boundary, after every callback has run, so that the state of all of them belongs to the same step.
Workers agree on each one, and the chief writes while training goes on.
"""

import concurrent.futures
import json
import sys

import keras
import tensorflow as tf

from keras_replicator import checkpoints
from keras_replicator.callback_states import CallbackStates, plain
from keras_replicator.checkpoints import CheckpointError
from keras_replicator.long_work import announced
from keras_replicator.resumed import find
from keras_replicator.run_state import RunState

# The exit code of a run that was preempted and saved (EX_TEMPFAIL): start it again.
PREEMPTED = 75


class Saver:
    """Saves and restores one trainer.

    Args:
        session: The `Session`.
    """

    def __init__(self, session):
        self._session = session
        self._callbacks = []
        self._states = CallbackStates([])
        self._phase = None
        self._streams = {}  # "train" and "validation" -> Stream
        self._requests = {}  # directory -> keep
        self._pending = None  # what was read before the variables existed
        self._position = {"epoch": 0, "step": 0, "total_steps": 0}
        self._writing = None
        self._pool = None
        self._config = None
        self.preempted = False

    # ----------------------------------------------------------------------------------- saving

    def save(self, directory, keep=None):
        """Saves now, or at the next boundary while training."""
        self._requests[str(directory)] = keep
        if not self._session.training:
            self._write_requested(self._position)
            self.finish()

    def preempt(self):
        """Asks for a checkpoint and the end of the run at the next boundary."""
        if not self._checkpoints():
            raise RuntimeError(
                "trainer.preempt() saves a run and ends it, and needs a folder to save it in: add "
                "kr.callbacks.Checkpoint to the callbacks of the fit that is to be preempted."
            )
        self.preempted = True

    def at_step(self, epoch, step, total_steps, stopped):
        """Saves what was asked for; returns whether the run must end.

        Args:
            epoch: Number of the epoch.
            step: Steps of the epoch that were made.
            total_steps: Steps of the run.
            stopped: Whether a callback of this worker has ended the training.
        """
        for callback in self._checkpoints():
            callback.on_steps_made(total_steps)
        stopped = self._agree(stopped)
        position = {"epoch": epoch, "step": step, "total_steps": total_steps}
        self._write_requested({**position, "stopped": stopped})
        return self.preempted

    def at_epoch_end(self, epoch, total_steps, logs, stopped):
        """Saves what was asked for at the end of an epoch.

        Args:
            epoch: Number of the epoch that has ended.
            total_steps: Steps of the run.
            logs: Logs of the epoch.
            stopped: Whether a callback of this worker has ended the training.
        """
        stopped = self._agree(stopped)
        position = {"epoch": epoch + 1, "step": 0, "total_steps": total_steps}
        self._write_requested({**position, "logs": plain(logs), "stopped": stopped})
        self.leave_if_preempted()

    def before_validation(self):
        """Notes what a validation changes, in case that it is interrupted."""
        if not self._checkpoints():
            return None
        return self._state().seeds(), self._positions()

    def in_validation(self, epoch, step, total_steps, logs, before):
        """Ends a run that was preempted in its validation, which is then begun anew.

        Args:
            epoch: Number of the epoch.
            step: Steps of the epoch.
            total_steps: Steps of the run.
            logs: Logs of the training of this epoch.
            before: What `before_validation` returned.
        """
        self._agree()
        if not self.preempted:
            return
        seeds, positions = before
        self._state().restore_seeds(seeds)
        position = {"epoch": epoch, "step": step, "total_steps": total_steps}
        position.update(validating=True, logs=plain(logs))
        self._write_requested(position, positions)
        self.leave_if_preempted()

    def leave_if_preempted(self):
        """Ends a preempted run, saved, with the code that means: start it again."""
        if not self.preempted:
            return
        error = self._outcome()
        self._raise_together(error)
        raise SystemExit(PREEMPTED)

    def finish(self):
        """Waits for the thread that writes, and raises what went wrong there."""
        for callback in self._checkpoints() if not self._session.training else ():
            callback.restore_signals()
        error = self._outcome()
        if error is not None:
            raise error

    def _outcome(self):
        """Waits for the thread that writes; returns its error, or None."""
        writing, self._writing = self._writing, None
        return None if writing is None else writing.exception()

    def _checkpoints(self):
        """The callbacks that save when a run is preempted."""
        return [c for c in self._callbacks if getattr(c, "saves_when_preempted", False)]

    def _agree(self, stopped=False):
        """One worker's signal, the chief's clock and the chief's disk count for all.

        Returns:
            Whether some worker has stopped.
        """
        engine = self._session.engine
        error = None
        if self._writing is not None and self._writing.done():
            error = self._outcome()
        if engine.num_workers > 1:
            is_chief = self._session.plan.is_chief
            total = engine.sum_over_workers(
                {
                    "preempted": float(self.preempted),
                    "wanted": float(is_chief and bool(self._requests)),
                    "failed": float(error is not None),
                    "stopped": float(stopped),
                }
            )
            stopped = total["stopped"]
            self.preempted = bool(total["preempted"])
            if not total["wanted"]:
                self._requests = {}
            elif not self._requests:
                self._requests = {"": None}  # the chief's clock was due, and it knows the folder
            if error is None and total["failed"]:
                error = CheckpointError("The chief could not write a checkpoint; see its error.")
        if error is not None:
            raise error
        if self.preempted:
            for callback in self._checkpoints():
                callback.on_preempted()
        return bool(stopped)

    def _raise_together(self, error):
        """Raises an error of one worker on all of them."""
        total = self._session.engine.sum_over_workers({"failed": float(error is not None)})
        if error is not None:
            raise error
        if total["failed"]:
            raise CheckpointError(
                "Another worker could not read or write a checkpoint; see its error. Every worker "
                "must see the folder of checkpoints."
            )

    def _write_requested(self, position, positions=None):
        self._position = position
        requests, self._requests = self._requests, {}
        if self.preempted:
            requests.update({str(c.directory): c.keep for c in self._checkpoints()})
        if not requests:
            return
        # Steps that were under way belong to the state, too; the next call tells the callbacks.
        late = self._session.engine.settle()
        if late:
            steps = {name: position[name] + late for name in ("step", "total_steps")}
            position = self._position = {**position, **steps}
            stream = self._streams["train"]
            stream.consumed(late)  # for the position that is saved; a call tells them later
            positions = self._positions()
            stream.consumed(-late)
        if self._config is None:
            self._config = _model_config(self._session.models)
        tensors, state = self._collect(position, positions)
        if not self._session.plan.is_chief:
            return
        places = (self._streams["train"].place() if self._streams else None) or {}
        error = self._outcome()
        if error is not None:
            raise error
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "keras_replicator-checkpoints")
        total_steps = position["total_steps"]
        self._writing = self._pool.submit(_write_all, requests, total_steps, tensors, state, places)

    def _collect(self, position, positions):
        session, phase = self._session, self._phase
        logs = None if phase is None else phase.logs
        window = None if phase is None or not session.window.steps else phase.window
        state = self._state()
        tensors = state.collect(window, {} if logs is None else logs.totals())
        entries, arrays = self._states.collect()
        tensors.update(arrays)
        history = getattr(session.models.host, "history", None)
        return tensors, {
            **position,
            "epochs_seen": session.epochs_seen,
            "shuffle_seed": session.shuffle_seed,
            "window": session.window.steps,
            "num_replicas": session.engine.num_replicas,
            "num_workers": session.engine.num_workers,
            "data": self._positions() if positions is None else positions,
            "history": plain(history.history if history else {}),
            "callbacks": entries,
            "plan": str(session.plan),
            "versions": {"keras": keras.__version__, "tensorflow": tf.__version__},
            "paths": state.paths(),
            "model": self._config,
        }

    def _positions(self):
        return {name: stream.position() for name, stream in self._streams.items()}

    def _state(self):
        session = self._session
        return RunState(session.models.host, session.optimizers, session.engine)

    # -------------------------------------------------------------------------------- restoring

    def restore(self, directory):
        """Restores what exists now; the rest when a loop has made it."""
        found = find(str(directory), self._session.engine, self._raise_together)
        if found is None:
            raise CheckpointError(
                f"No complete checkpoint was found. Received: directory={str(directory)!r}. Give "
                "the folder that kr.callbacks.Checkpoint or trainer.save_checkpoint wrote to."
            )
        self._pending = found
        session = self._session
        if session.models.host.built:
            session.build_optimizer()
        if self._state().holds_all(found.tensors):
            self._state().check(found.tensors)
            self._apply(found)

    def prepare(self, resume, callbacks, phase, streams):
        """Called by `fit` when every variable exists.

        Args:
            resume: None, a directory, or "auto" for that of the Checkpoint callback.
            callbacks: The callbacks of this fit.
            phase: The training `Phase`.
            streams: Dict of the `Stream` of "train" and, where there is one, of "validation".

        Returns:
            A `Resumed`, or None.
        """
        self._callbacks, self._phase, self._streams = callbacks, phase, streams
        self._states = CallbackStates(callbacks)
        self._requests, self.preempted = {}, False
        self._check_folders()
        if self._pending is not None:
            self._state().check(self._pending.tensors)
            self._apply(self._pending)
        self._position = {"epoch": 0, "step": 0, "total_steps": 0}
        if resume is None:
            return None
        streams["train"].source.check_resume()
        found = find(self._folder_of(resume), self._session.engine, self._raise_together)
        if found is None:
            return None
        self._state().check(found.tensors, found.in_mid_epoch and not found.is_validating)
        if "train" in found.state["data"]:
            streams["train"].check(found.state["data"]["train"])
        self._session.shuffle_seed = found.state["shuffle_seed"]
        self._states.cut_files(found.state["callbacks"])
        return found

    def begun(self):
        """Called when the callbacks' `on_train_begin` has run."""
        self._states.begun()

    def go_on(self, resumed):
        """Restores everything, once the callbacks have begun."""
        with announced(f"Restoring {resumed.path}", self._session.plan.is_chief):
            self._apply(resumed)
        self._position = resumed.position
        unmatched = self._states.restore(resumed.state["callbacks"], resumed.tensors)
        places = checkpoints.read_iterators(resumed.path)
        for name, position in resumed.state["data"].items():
            if name in self._streams:
                self._streams[name].resume(position, places if name == "train" else None)
        if self._session.plan.is_chief:
            print(resumed.report(self._session.engine, unmatched), file=sys.stderr)

    def _apply(self, found):
        phase, session = self._phase, self._session
        self._state().restore(
            found.tensors,
            None if phase is None else phase.window,
            None if phase is None else phase.logs,
        )
        session.epochs_seen = found.state["epochs_seen"]
        session.shuffle_seed = found.state["shuffle_seed"]
        session.window.steps = found.state["window"] % session.window.size
        self._pending = None

    def _check_folders(self):
        """A folder that cannot be written is an error before the first step, on all workers."""
        error = None
        if self._session.plan.is_chief:
            try:
                for callback in self._checkpoints():
                    checkpoints.check_writable(str(callback.directory))
            except CheckpointError as found:
                error = found
        self._raise_together(error)

    def _folder_of(self, resume):
        if resume != "auto":
            return str(resume)
        for callback in self._checkpoints():
            return str(callback.directory)
        raise ValueError(
            "`resume='auto'` takes the folder of kr.callbacks.Checkpoint, and there is none among "
            "the callbacks. Add one, or give the folder. Received: resume='auto'"
        )


def _write_all(requests, total_steps, tensors, state, places):
    for directory, keep in requests.items():
        checkpoints.write(directory, total_steps, tensors, state, keep, places)


def _model_config(models):
    """The config from which the model, or each of several, can be made anew; or None."""
    named = models.structure if models.is_group else {"": models.structure}
    try:
        configs = {name: keras.saving.serialize_keras_object(m) for name, m in named.items()}
        for config in configs.values():
            config.pop("compile_config", None)
        json.dumps(configs)
    except (NotImplementedError, TypeError, ValueError):
        return None
    return configs
