"""Unbroken runs of two workers: that of tests/crashes.py, and one that leaves checkpoints."""

import keras
import numpy as np
import tensorflow as tf

import keras_replicator as kr
from tests import crashes
from tests.helpers import NotesValues, column, ones, regression, sequential
from tests.multiworker.jobs import start, task
from tests.multiworker.scenarios import seeded_network, weights_of


def compiled(**options):
    trainer = kr.ReplicatedTrainer(seeded_network, seed=3, **options)
    trainer.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return trainer


def pipeline():
    return tf.data.Dataset.from_tensor_slices(regression(23)).shuffle(9, seed=5).batch(6)


def fit(trainer, directory, **options):
    """History and weights of 4 epochs of `pipeline`, with a checkpoint at each step."""
    checkpoint = kr.callbacks.Checkpoint(directory, every="1 steps", keep=None)
    history = trainer.fit(pipeline(), epochs=4, verbose=0, callbacks=[checkpoint], **options)
    return {"history": history.history, "weights": weights_of(trainer)}


def order_without_a_seed():
    """The rows that this worker sees of 40 shuffled ones, when nobody gave a seed."""
    np.random.seed(task()[1])
    notes = NotesValues()
    trainer = kr.ReplicatedTrainer(lambda: sequential((1,), notes, keras.layers.Dense(1)))
    trainer.compile("sgd", "mse")
    trainer.fit(column(*range(40)), ones(40), batch_size=8, verbose=0)
    return np.concatenate(notes.seen).ravel().tolist()


def main(results, folder):
    results["saved"] = fit(compiled(), folder / "saved")
    results["rows"] = order_without_a_seed()
    crashes.train(folder / "unbroken", 0)


if __name__ == "__main__":
    start(main)
