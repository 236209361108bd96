"""Trains on the digits of scikit-learn under Ray Train: Ray starts the workers.

python examples/ray/train.py --workers 2
"""

import argparse

from ray.train import ScalingConfig, get_context, report
from ray.train.tensorflow import TensorflowTrainer


def train(config):
    """Runs on each worker. Ray has set TF_CONFIG: TensorFlow starts after that."""
    import keras
    from sklearn.datasets import load_digits

    import keras_replicator as kr

    def build_model():
        return keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")

    trainer = kr.ReplicatedTrainer(build_model, expected_workers=config["workers"], seed=0)
    trainer.compile(
        optimizer=keras.optimizers.Adam(0.003),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = trainer.fit(
        images, labels, batch_size=128, epochs=config["epochs"], validation_split=0.2, verbose=2
    )
    # The logs are equal on all workers; Ray wants each of them to report.
    logs = {name: values[-1] for name, values in history.history.items()}
    report(logs)
    if get_context().get_world_rank() == 0:
        print(f"accuracy: {logs['val_accuracy']:.4f}  loss: {logs['val_loss']:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    arguments = parser.parse_args()

    trainer = TensorflowTrainer(
        train,
        train_loop_config={"workers": arguments.workers, "epochs": arguments.epochs},
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpus),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
