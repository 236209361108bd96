"""A job that runs rows of the parity registry on several workers.

The arguments are the devices of each worker and the names of rows, whose initial weights lie in
the shared folder.
"""

import traceback

import keras
import numpy as np

import keras_replicator as kr
from tests.helpers import exercise
from tests.multiworker.jobs import start
from tests.parity.registry import ROWS


def main(results, folder, devices, *names):
    kr.simulate_devices(int(devices))
    rows = {row.name: row for row in ROWS}
    for name in names:
        keras.backend.clear_session()
        try:
            results[name] = run(rows[name], folder)
        except Exception:
            results[name] = {"error": traceback.format_exc()}


def run(row, folder):
    """What a row leaves behind, as JSON."""
    trainer = kr.ReplicatedTrainer(row.build)
    with np.load(folder / f"{row.name}.npz") as weights:
        trainer.model.set_weights([weights[f"arr_{i}"] for i in range(len(weights.files))])
    more = {**row.compile_more, "gradient_accumulation_steps": row.accumulate}
    found = exercise(
        trainer,
        {**row.compile(), **more},
        row.data(),
        batch_size=row.batch_size,
        epochs=row.epochs,
    )
    scale = getattr(found.optimizer, "dynamic_scale", None)
    return {
        "replicas": trainer.num_replicas,
        "weights": [weight.tolist() for weight in found.weights],
        "history": found.history,
        "evaluation": found.evaluation,
        "predictions": keras.tree.map_structure(lambda array: array.tolist(), found.predictions),
        "iterations": found.iterations,
        "scale": None if scale is None else float(scale),
    }


if __name__ == "__main__":
    start(main)
