"""A job whose worker 1 ends its process with code 3 in batch 5 of a fit without end."""

import os
import time

from keras import callbacks

import keras_replicator as kr
from tests.helpers import ones, toy
from tests.multiworker.jobs import start, task
from tests.multiworker.scenarios import dataset


class Ends(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 5 and task() == ("worker", 1):
            os._exit(3)


def main(results, folder):
    trainer = kr.ReplicatedTrainer(toy, peer_timeout=60)
    trainer.compile(optimizer="sgd", loss="mse", steps_per_execution=1)
    data = dataset(ones(4), ones(4), batch_size=4).repeat()
    started = time.monotonic()
    try:
        trainer.fit(data, steps_per_epoch=100_000_000, verbose=0, callbacks=[Ends()])
    except Exception as error:
        results["error"] = str(error)
        results["seconds"] = time.monotonic() - started
        raise


if __name__ == "__main__":
    start(main)
