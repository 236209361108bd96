"""`Checkpoint`: saves the whole state of a run, and ends it properly when it is preempted."""

import math
import os
import re
import signal
import sys
import threading
import time

import keras

from keras_replicator.callbacks.signals import Announced

_UNITS = {
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "min": 60.0,
    "minute": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
}
# Start again (EX_TEMPFAIL), and: ended by SIGTERM, with nothing new to start from.
_PREEMPTED, _TERMINATED = 75, 128 + 15


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints from which `trainer.fit(resume=…)` goes on exactly.

    A checkpoint holds weights, optimizers, random streams, metrics, the position in the data, the
    history and the state of the other callbacks. It is taken when every callback has seen the
    step, and written by the chief while training goes on.

    SIGTERM (and SIGUSR1 under Slurm) saves at the next step on all workers and ends the process
    with code 75, which `keras-replicator launch` and the recipes for Slurm and Kubernetes take as
    "start again". A step, or a disk, that takes longer than `grace` seconds is not waited for: the
    process then ends with code 75 when this fit has written a checkpoint before, from which the
    next start goes on, and with 143 when it has not.

    Args:
        directory: Folder of the run's checkpoints.
        every: How often: "100 steps", "1 epoch", "5min", "30 s".
        keep: How many of the newest checkpoints stay, or None for all.
        grace: Seconds from the signal to the end of the process, or None for no limit. Less than
            what the scheduler gives before it sends SIGKILL (30 seconds in Kubernetes and
            `keras-replicator launch`).

    Raises:
        ValueError: When an argument cannot be read.

    Example:

    ```python
    trainer.fit(
        x, y, epochs=90, resume="auto",
        callbacks=[kr.callbacks.Checkpoint("run/checkpoints", every="5min")],
    )
    ```
    """

    saves_when_preempted = True

    def __init__(self, directory, every="1 epoch", keep=3, grace=25.0):
        super().__init__()
        self.directory = os.fspath(directory)
        self.every = every
        self.keep = keep
        self.grace = grace
        self._steps, self._epochs, self._seconds = _parse(every)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(
                "Checkpoint: `keep` must be an int of at least 1, or None for all. "
                f"Received: keep={keep!r}"
            )
        if grace is not None and not (0 < grace < math.inf):
            raise ValueError(
                "Checkpoint: `grace` must be a number of seconds above 0, or None for no limit. "
                f"Received: grace={grace!r}"
            )
        self._made = 0  # steps of the run when they were last looked at
        self._last = None  # when the last one was asked for, on the monotonic clock
        self._saved_before = False  # whether this fit has asked for one
        self._announced = None

    @property
    def batch_interval(self):
        """Steps between the batches that this callback must see; None when it needs none."""
        return self._steps

    def get_state(self):
        """Returns what a checkpoint keeps of this callback."""
        return {"made": self._made}

    def set_state(self, state):
        """Takes what `get_state` returned."""
        self._made = state["made"]

    def on_train_begin(self, logs=None):
        self._last, self._made, self._saved_before = time.monotonic(), 0, False
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM]
            if "SLURM_JOB_ID" in os.environ:
                numbers.append(signal.SIGUSR1)
            preempt = self._trainer().preempt
            self._announced = Announced(numbers, preempt, self.grace, self._end_late)

    def on_train_end(self, logs=None):
        self.restore_signals()

    def restore_signals(self):
        """Gives the signals back to whoever handled them before."""
        announced, self._announced = self._announced, None
        if announced is not None:
            announced.close()

    def on_train_batch_end(self, batch, logs=None):
        if self._seconds is not None and time.monotonic() - self._last >= self._seconds:
            self._save()

    def on_steps_made(self, total_steps):
        """Told by the trainer how many steps the run has made."""
        if self._steps is not None and total_steps // self._steps > self._made // self._steps:
            self._save()
        self._made = total_steps

    def on_epoch_end(self, epoch, logs=None):
        if self._epochs is not None and (epoch + 1) % self._epochs == 0:
            self._save()

    def on_preempted(self):
        """Told by the trainer that this run ends, here or on another worker."""
        if self._announced is not None:
            self._announced.start_deadline()

    def _save(self):
        self._last = time.monotonic()
        self._saved_before = True
        self._trainer().save_checkpoint(self.directory, keep=self.keep)

    def _end_late(self):
        code = _PREEMPTED if self._saved_before else _TERMINATED
        print(
            f"The run could not be saved within grace={self.grace:g} seconds of the signal. The "
            f"process ends with code {code}; earlier checkpoints in {self.directory} are whole.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(code)

    def _trainer(self):
        trainer = (self.params or {}).get("trainer")
        if trainer is None:
            raise RuntimeError(
                "kr.callbacks.Checkpoint needs the trainer: pass it to ReplicatedTrainer.fit, not "
                "to keras.Model.fit."
            )
        return trainer


def _parse(every):
    """Returns `(steps, epochs, seconds)`, one of which is set."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(every).lower())
    if match:
        number, unit = float(match[1]), match[2]
        single = unit.removesuffix("s") if unit != "s" else unit
        if number > 0 and single == "step" and number == int(number):
            return int(number), None, None
        if number > 0 and single == "epoch" and number == int(number):
            return None, int(number), None
        if single in _UNITS:
            return None, None, number * _UNITS[single]
    raise ValueError(
        "Checkpoint: `every` must be a number with a unit, such as '100 steps', '1 epoch' or "
        f"'5min'. Received: every={every!r}"
    )
