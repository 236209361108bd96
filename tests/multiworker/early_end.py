"""A job whose workers do not end together: the chief sleeps 6 seconds after fit, then saves."""

import time

import keras

import keras_replicator as kr
from tests.helpers import first_weight, ones, toy
from tests.multiworker.jobs import start, task


def main(results, folder):
    trainer = kr.ReplicatedTrainer(toy)
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    trainer.fit(ones(4), ones(4), batch_size=4, verbose=0)
    results["replicas"] = int(trainer.num_replicas)
    results["w"] = first_weight(trainer.model)
    if task() == ("worker", 0):
        time.sleep(6)
        trainer.model.save(folder / "model.keras")


if __name__ == "__main__":
    start(main)
