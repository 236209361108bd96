"""How many bytes a step moves through the network of this machine, for tables of two sizes."""

import keras
import numpy as np
from keras import layers

import keras_replicator as kr
from tests.multiworker.jobs import start

COLUMNS = 64
STEPS = 30


def bytes_moved():
    """Bytes that this machine has sent to itself so far."""
    with open("/proc/net/dev", encoding="ascii") as file:
        (line,) = [line for line in file if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def build(rows):
    inputs = keras.Input((1,), dtype="int32")
    vectors = layers.Flatten()(layers.Embedding(rows, COLUMNS)(inputs))
    return keras.Model(inputs, layers.Dense(1)(vectors))


def measure(rows, batch):
    """Bytes of a step, and the losses of two epochs."""
    trainer = kr.ReplicatedTrainer(lambda: build(rows))
    trainer.compile(optimizer=keras.optimizers.Adagrad(0.1), loss="mse")
    x = np.random.default_rng(0).integers(0, rows, (batch * STEPS, 1)).astype("int32")
    y = np.ones((batch * STEPS, 1), "float32")
    first = trainer.fit(x, y, batch_size=batch, verbose=0).history["loss"][0]
    before = bytes_moved()
    second = trainer.fit(x, y, batch_size=batch, verbose=0).history["loss"][0]
    return {"bytes": (bytes_moved() - before) / STEPS, "losses": [first, second]}


def main(results, folder):
    for rows, batch in ((1_000_000, 1024), (1_000_000, 8192), (100_000, 8192)):
        results[f"{rows} rows, batch {batch}"] = measure(rows, batch)


if __name__ == "__main__":
    start(main)
