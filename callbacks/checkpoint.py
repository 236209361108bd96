"""`Checkpoint`: saves the whole state of a run, and ends it properly when it is preempted."""

import os
import re
import signal
import threading
import time

import keras

_UNITS = {
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "min": 60.0,
    "minute": 60.0,
    "h": 3600.0,
    "hour": 3600.0,
}


class Checkpoint(keras.callbacks.Callback):
    """Writes checkpoints from which `trainer.fit(resume=…)` goes on exactly.

    A checkpoint holds weights, optimizers, random streams, metrics, the position in the data, the
    history and the state of the other callbacks. It is taken when every callback has seen the
    step, and written by the chief while training goes on.

    SIGTERM (and SIGUSR1 under Slurm) saves at the next step on all workers and ends the process
    with code 75, which `keras-replicator launch` and the recipes for Slurm and Kubernetes take as
    "start again".

    Args:
        directory: Folder of the run's checkpoints.
        every: How often: "100 steps", "1 epoch", "5min", "30 s".
        keep: How many of the newest checkpoints stay, or None for all.

    Raises:
        ValueError: When `every` cannot be read.

    Example:

    ```python
    trainer.fit(
        x, y, epochs=90, resume="auto",
        callbacks=[kr.callbacks.Checkpoint("run/checkpoints", every="5min")],
    )
    ```
    """

    saves_when_preempted = True

    def __init__(self, directory, every="1 epoch", keep=3):
        super().__init__()
        self.directory = os.fspath(directory)
        self.every = every
        self.keep = keep
        self._steps, self._epochs, self._seconds = _parse(every)
        self._last = None  # when the last one was taken, on the monotonic clock
        self._handlers = {}

    @property
    def batch_interval(self):
        """Steps between the batches that this callback must see; None when it needs none."""
        return self._steps

    def on_train_begin(self, logs=None):
        self._last = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM]
            if "SLURM_JOB_ID" in os.environ:
                numbers.append(signal.SIGUSR1)
            self._handlers = {number: signal.signal(number, self._preempt) for number in numbers}

    def on_train_end(self, logs=None):
        self.restore_signals()

    def restore_signals(self):
        """Gives the signals back to whoever handled them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def on_train_batch_end(self, batch, logs=None):
        if self._seconds is not None and time.monotonic() - self._last >= self._seconds:
            self._save()

    def on_steps_made(self, total_steps):
        """Told by the trainer how many steps the run has made."""
        if self._steps is not None and total_steps % self._steps == 0:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        if self._epochs is not None and (epoch + 1) % self._epochs == 0:
            self._save()

    def _save(self):
        self._last = time.monotonic()
        self._trainer().save_checkpoint(self.directory, keep=self.keep)

    def _preempt(self, number, frame):
        del number, frame
        self._trainer().preempt()

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
