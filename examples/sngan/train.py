"""Trains SN-GAN on all devices of this machine (or of a job), judges its samples, and resumes.

    python examples/sngan/train.py                                   # Fashion-MNIST, on a CPU
    python examples/sngan/train.py --replicas 2                      # the same on two replicas
    python examples/sngan/train.py --preset cifar10                  # the published one, for GPUs
    tensorboard --logdir logs/sngan

Started again with the same --logdir, it goes on where the last checkpoint was written.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import digits  # noqa: E402 - examples/digits.py
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402

import keras_replicator as kr  # noqa: E402
from sngan.classifier import train_classifier  # noqa: E402
from sngan.data import training_groups  # noqa: E402
from sngan.figures import save_figures  # noqa: E402
from sngan.model import build_models  # noqa: E402
from sngan.presets import PRESETS  # noqa: E402
from sngan.quality import SampleQuality  # noqa: E402
from sngan.step import make_optimizers, make_train_step, predict_step  # noqa: E402


def train(
    preset="fashion_mnist32",
    replicas=None,
    steps=None,
    batch_size=None,
    logdir="logs/sngan",
    sync_batch_norm=False,
    evaluations=20,
    samples=5000,
    classifier_epochs=3,
    seed=0,
    builder=None,
):
    """Trains, and returns the history.

    Args:
        preset: name of a preset, or a `Preset`.
        replicas: devices of this machine to use; None for all. A machine without accelerators
            splits its CPU into that many.
        steps: generator updates, each with the discriminator updates that the preset wants.
        batch_size: rows of each discriminator update, over all replicas.
        logdir: folder of logs, checkpoints and pictures.
        sync_batch_norm: whether the generator's BatchNormalization sees the rows of all replicas.
        evaluations: how often samples are judged.
        samples: how many of them.
        classifier_epochs: epochs of the classifier that judges.
        seed: seed of weights, latents and order.
        builder: a tfds builder instead of the preset's, for tests.

    Returns:
        Dict of lists, one entry per evaluation.
    """
    if replicas is not None and not tf.config.list_physical_devices("GPU"):
        kr.simulate_devices(replicas)
    tfds.disable_progress_bar()
    preset = PRESETS[preset] if isinstance(preset, str) else preset
    steps, batch_size = steps or preset.updates, batch_size or preset.batch_size
    steps_per_epoch = max(steps // evaluations, 1)

    # The trainer comes first: it connects the workers, which has to precede all TensorFlow work.
    trainer = kr.ReplicatedTrainer(
        lambda: build_models(preset, seed),
        devices=replicas,
        train_step=make_train_step(preset, lambda: trainer.optimizers),
        predict_step=predict_step,
        seed=seed,
    )
    trainer.compile(optimizer=make_optimizers(preset, steps), sync_batch_norm=sync_batch_norm)
    print(trainer.plan)

    builder = builder or digits.builder(preset.dataset)
    digits.prepare(builder)
    print("training the classifier that judges the samples")
    judge = train_classifier(builder, preset, devices=replicas, epochs=classifier_epochs)
    quality = SampleQuality(trainer, judge, preset, builder, samples, seed=seed)

    print(f"training {steps} generator updates on {trainer.num_replicas} replica(s)")
    history = trainer.fit(
        training_groups(builder, preset, batch_size, seed),
        epochs=evaluations,
        steps_per_epoch=steps_per_epoch,
        verbose=2,
        resume="auto",
        callbacks=[
            quality,
            kr.callbacks.Throughput(),
            kr.callbacks.TensorBoard(logdir, images={"samples": quality.pictures}),
            kr.callbacks.Checkpoint(os.path.join(logdir, "checkpoints"), every="1 epoch"),
        ],
    ).history
    history["updates"] = [steps_per_epoch * (epoch + 1) for epoch in range(evaluations)]
    if trainer.plan.is_chief:
        save_figures(logdir, history, quality)
    report(history, quality)
    return history


def report(history, quality):
    """Prints the result of a run."""
    distances = history["frechet_distance"]
    early = distances[max(len(distances) // 10 - 1, 0)]
    print(
        f"Fréchet distance: {distances[-1]:.2f}  after the first tenth: {early:.2f}  "
        f"real against real: {quality.real_to_real:.2f}"
    )
    print(
        f"recognised: {history['recognised'][-1]:.3f}  worst class: {quality.shares.min():.3f}  "
        f"by class: {np.round(quality.shares[:10], 2).tolist()}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--preset", default="fashion_mnist32", choices=sorted(PRESETS))
    parser.add_argument("--replicas", type=int, help="devices to use (default: all)")
    parser.add_argument("--steps", type=int, help="generator updates (default: the preset's)")
    parser.add_argument("--batch-size", type=int, help="rows of each discriminator update")
    parser.add_argument("--logdir", default="logs/sngan")
    parser.add_argument(
        "--sync-batch-norm",
        action="store_true",
        help="let BatchNormalization see the rows of all replicas",
    )
    parser.add_argument("--evaluations", type=int, default=20, help="how often samples are judged")
    parser.add_argument("--samples", type=int, default=5000, help="how many samples are judged")
    parser.add_argument("--classifier-epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
