"""The only worker is killed, and nobody replaces it."""

import time

import keras

import keras_replicator as kr
from keras_replicator import workers
from tests.helpers import network
from tests.multiworker.jobs import start
from tests.parameter_server import scenarios
from tests.parameter_server.killing import Kills, note_process


class Clock(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.last = time.monotonic()


def main(results, folder):
    note_process(folder)
    trainer = kr.ReplicatedTrainer(network, peer_timeout=4)
    trainer.compile(optimizer="sgd", loss="mse")
    clock = Clock()
    try:
        trainer.fit(
            *scenarios.linear(400, seed=0),
            batch_size=4,
            verbose=0,
            callbacks=[clock, Kills(folder / "worker_0", 10)],
        )
    except workers.WorkerLostError as error:
        results["error"] = str(error)
        results["seconds"] = time.monotonic() - clock.last
        raise


if __name__ == "__main__":
    start(main)
