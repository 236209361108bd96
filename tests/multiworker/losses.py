"""A job that trains without end, until one of its workers is lost.

The arguments are `peer_timeout` and `start_timeout`. Each worker notes step 5, and its error.
"""

import time

from keras import callbacks

import keras_replicator as kr
from tests.helpers import ones, toy
from tests.multiworker.jobs import start
from tests.multiworker.scenarios import dataset


class NotesStep(callbacks.Callback):
    def __init__(self, results):
        super().__init__()
        self.results = results

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5:
            self.results["step"] = 5


def main(results, folder, peer_timeout, start_timeout):
    try:
        trainer = kr.ReplicatedTrainer(
            toy, peer_timeout=float(peer_timeout), start_timeout=float(start_timeout)
        )
        trainer.compile(optimizer="sgd", loss="mse", steps_per_execution=1)
        data = dataset(ones(4), ones(4), batch_size=4).repeat()
        notes = NotesStep(results)
        trainer.fit(data, steps_per_epoch=100_000_000, verbose=0, callbacks=[notes])
    except Exception as error:
        results["kind"] = type(error).__name__
        results["error"] = str(error)
        results["at"] = time.time()
        raise


if __name__ == "__main__":
    start(main)
