"""Under the launcher: worker 1 is killed and replaced, then the server is killed; it goes on.

keras-replicator launch --workers 2 --ps 1 --max-restarts 2 losses.py FOLDER
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras

import keras_replicator as kr
from tests.helpers import RowCounter, network
from tests.parameter_server import scenarios
from tests.parameter_server.killing import note_process

STEPS = 300


class Trouble(keras.callbacks.Callback):
    """Kills worker 1 at step 20, waits until it makes steps again, then kills the server."""

    batch_interval = 1

    def __init__(self, folder, trainer):
        super().__init__()
        self.folder, self.trainer = folder, trainer
        self.killed_at, self.came_back = None, None

    def on_train_batch_end(self, batch, logs=None):
        records = self.trainer.step_records
        if batch == 20:
            self.kill("worker_1")
            self.killed_at = time.time()
        elif self.killed_at is not None and self.came_back is None and batch > 60:
            if batch < STEPS - 60 and records[-1].worker == 1:
                self.came_back = batch
            else:
                time.sleep(0.3)  # a new process takes some seconds
        elif self.came_back is not None and batch == self.came_back + 25:
            (self.folder / "came_back").write_text(str(self.came_back))
            self.kill("ps_0")

    def kill(self, name):
        os.kill(int((self.folder / name).read_text()), signal.SIGKILL)


def main(folder):
    note_process(folder)
    start = int(os.environ["KERAS_REPLICATOR_RESTART"])
    trainer = kr.ReplicatedTrainer(network)
    trainer.compile(optimizer="adam", loss="mse", metrics=[RowCounter()])
    checkpoint = kr.callbacks.Checkpoint(folder / "checkpoints", every="10 steps")
    first = not (folder / "came_back").exists()
    trouble = [Trouble(folder, trainer)] if first else []
    history = trainer.fit(
        *scenarios.linear(4 * STEPS, seed=0),
        batch_size=4,
        verbose=0,
        resume="auto",
        callbacks=[checkpoint, *trouble],
    ).history
    found = {
        "start": start,
        "iterations": int(trainer.model.optimizer.iterations),
        "rows": history["rows"],
        "steps": len(trainer.step_records),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
