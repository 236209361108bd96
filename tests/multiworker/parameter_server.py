"""A job with parameter servers: one script for all roles; the chief trains and has the results."""

import keras

import keras_replicator as kr
from tests.helpers import first_weight, network, normal, ones, toy
from tests.multiworker.jobs import start


def linear(rows, seed):
    x = normal(rows, 3, seed=seed)
    return x, x @ normal(3, 1, seed=9)


def b28():
    trainer = kr.ReplicatedTrainer(toy, strategy="parameter_server")
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    history = trainer.fit(ones(80), ones(80), batch_size=4, verbose=0).history
    iterations = int(trainer.model.optimizer.iterations)
    return {"iterations": iterations, "w": first_weight(trainer.model), "loss": history["loss"]}


def b28c():
    trainer = kr.ReplicatedTrainer(network, strategy="parameter_server")
    trainer.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    history = trainer.fit(
        *linear(64, seed=0), batch_size=8, epochs=5, validation_data=linear(16, seed=5), verbose=0
    ).history
    return {"iterations": int(trainer.model.optimizer.iterations), "history": history}


def main(results, folder):
    results["b28"] = b28()
    results["b28c"] = b28c()


if __name__ == "__main__":
    start(main)
