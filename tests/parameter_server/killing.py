"""Kills processes of a job."""

import os
import signal

import keras

from tests.multiworker.jobs import task


class Kills(keras.callbacks.Callback):
    """Kills a process at a batch."""

    batch_interval = 1

    def __init__(self, path, batch):
        super().__init__()
        self.path, self.batch = path, batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            os.kill(int(self.path.read_text()), signal.SIGKILL)


def note_process(folder):
    """Leaves the number of this process where the chief finds it."""
    role, index = task()
    unfinished = folder / f"{role}_{index}.unfinished"
    unfinished.write_text(str(os.getpid()))
    unfinished.replace(folder / f"{role}_{index}")
