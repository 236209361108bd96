"""A job whose script makes the strategy itself, and hands it to the trainer."""

import numpy as np
import tensorflow as tf

import keras_replicator as kr
from tests.multiworker.jobs import start
from tests.multiworker.scenarios import seeded_network, train


def main(results, folder):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    trainer = kr.ReplicatedTrainer(seeded_network, strategy=strategy, expected_workers=2)
    x = np.linspace(-1, 1, 33, dtype="float32").reshape(11, 3)
    results["trained"] = train(trainer, x, x[:, :1] ** 2, batch_size=4, epochs=2)
    results["predicted"] = trainer.predict(x, batch_size=4, verbose=0).tolist()
    results["plan"] = str(trainer.plan)


if __name__ == "__main__":
    start(main)
