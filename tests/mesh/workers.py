"""A job of workers with two devices each, whose mesh lies over all of them.

The initial weights of a subject lie in the shared folder. The arguments are names of scenarios.
"""

import traceback

import keras
import numpy as np
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import exercise, network, regression, regression_step, sequential
from tests.mesh.subjects import FIT, ROWS, SUBJECTS, adam, trainer
from tests.multiworker.jobs import start, task


def subject(name, folder):
    """20 updates of a subject on the mesh 2x2, rows over workers, weights over devices."""
    found = trainer(name, "2x2")
    with np.load(folder / f"{name}.npz") as weights:
        found.model.set_weights([weights[f"arr_{i}"] for i in range(len(weights.files))])
    run = exercise(found, adam(), SUBJECTS[name][1](ROWS), **FIT)
    return {
        "plan": str(found.plan),
        "weights": [weight.tolist() for weight in run.weights],
        "history": run.history,
        "evaluation": run.evaluation,
        "predictions": run.predictions.tolist(),
        "iterations": run.iterations,
    }


def counting_step(model, batch):
    """A custom step that counts its rows."""
    return {**regression_step(model, batch), "rows": kr.replica.Sum(kr.replica.global_rows())}


def custom(resume=None, epochs=3, callbacks=None):
    """A custom step with uneven batches; draws its initial weights without a seed."""

    def build():
        return sequential((3,), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1))

    found = kr.ReplicatedTrainer(
        build, layout=kr.Layout({"batch": 2, "model": 2}, "auto"), train_step=counting_step
    )
    found.compile(keras.optimizers.Adam(0.01))
    found.fit(
        *regression(21),
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        resume=resume,
    )
    (outputs,) = found.run(lambda x: {"x": x, "sum": keras.ops.sum(x)}, regression(6)[0])
    return {
        "weights": [weight.tolist() for weight in found.model.get_weights()],
        "history": found.history.history,
        "outputs": {name: np.asarray(value).tolist() for name, value in outputs.items()},
    }


def saved_and_resumed(folder):
    """The unbroken run, and one that goes on from its first epoch in mid-epoch."""
    checkpoint = kr.callbacks.Checkpoint(folder / "checkpoints", every="4 steps", keep=None)
    unbroken = custom(callbacks=[checkpoint])
    keras.backend.clear_session()
    return {
        "unbroken": unbroken,
        "resumed": custom(resume=folder / "checkpoints" / "step-00000004"),
    }


def weights_over_workers(folder):
    """A rule that no worker could read."""
    trainer("mlp", "1x4")


def other_order(folder):
    """A data set that comes in another order on each worker."""
    x, y = regression(8)
    if task()[1] == 1:
        x, y = x[::-1], y[::-1]
    found = kr.ReplicatedTrainer(network, layout=kr.Layout({"batch": 2, "model": 2}, "auto"))
    found.compile("sgd", "mse")
    found.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), epochs=3, verbose=0)


SCENARIOS = {"custom": saved_and_resumed, "over": weights_over_workers, "order": other_order}


def main(results, folder, *names):
    kr.simulate_devices(2)
    for name in names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        try:
            if name in SUBJECTS:
                results[name] = subject(name, folder)
            else:
                results[name] = SCENARIOS[name](folder)
        except Exception:
            results[name] = {"error": traceback.format_exc()}


if __name__ == "__main__":
    start(main)
