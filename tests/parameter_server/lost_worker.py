"""Worker 1 is killed in mid-epoch, and nobody replaces it."""

import os
import signal

import keras

import keras_replicator as kr
from tests.helpers import RowCounter, network
from tests.multiworker.jobs import start, task
from tests.parameter_server import scenarios


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


def main(results, folder):
    note_process(folder)
    keras.utils.set_random_seed(0)
    trainer = kr.ReplicatedTrainer(network)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 100, 0.5)
    trainer.compile(
        optimizer=keras.optimizers.Adam(schedule), loss="mse", metrics=[RowCounter(), "mae"]
    )
    history = trainer.fit(
        *scenarios.linear(scenarios.ROWS, seed=0),
        batch_size=scenarios.BATCH,
        epochs=2,
        verbose=0,
        validation_data=scenarios.linear(21, seed=3),
        callbacks=[Kills(folder / "worker_1", 20)],
    ).history
    records = trainer.step_records
    results["found"] = {
        "iterations": int(trainer.model.optimizer.iterations),
        "history": history,
        "rate": [float(trainer.model.optimizer.learning_rate), float(schedule(800))],
        "before": sorted({record.worker for record in records[:20]}),
        "after": sorted({record.worker for record in records[60:]}),
        "steps": len(records),
    }


if __name__ == "__main__":
    start(main)
