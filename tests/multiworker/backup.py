"""A job of 5 epochs under BackupAndRestore; with the argument "fail" epoch 2 does not start."""

import keras
from keras import callbacks

import keras_replicator as kr
from tests.helpers import regression
from tests.multiworker.jobs import start
from tests.multiworker.scenarios import seeded_network, weights_of


class Fails(callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("the test ends this job")


def main(results, folder, *arguments):
    trainer = kr.ReplicatedTrainer(seeded_network)
    trainer.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    history = trainer.fit(
        *regression(12),
        batch_size=4,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[
            callbacks.BackupAndRestore(str(folder / "backup")),
            *([Fails()] if "fail" in arguments else []),
        ],
    )
    results["epochs"] = history.epoch
    results["weights"] = weights_of(trainer)


if __name__ == "__main__":
    start(main)
