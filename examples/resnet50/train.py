"""Trains ResNet-50 v1.5 on ImageNet, or ResNet-20 on small images, on all devices or a job.

    python examples/resnet50/train.py                                     # ImageNet from tfds
    python examples/resnet50/train.py --folder /data/imagenet             # from JPEGs
    python examples/resnet50/train.py --preset lars --batch-size 16384
    python examples/resnet50/train.py --model resnet20 --dataset fashion_mnist --replicas 2
    python examples/resnet50/train.py --mesh batch=4,model=2              # a split classifier
    tensorboard --logdir logs/resnet50

Started again with the same --logdir, it goes on where the last checkpoint was written.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import digits  # noqa: E402 - examples/digits.py
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402

import keras_replicator as kr  # noqa: E402
from resnet50 import data  # noqa: E402
from resnet50.model import build_model  # noqa: E402
from resnet50.presets import PRESETS  # noqa: E402
from resnet50.recipe import SmoothedCrossentropy, make_optimizer  # noqa: E402

# The part of ResNet that grows with the number of classes.
SPLIT_CLASSIFIER = {"logits/kernel": (None, "model"), "logits/bias": ("model",)}


def train(
    preset,
    folder=None,
    replicas=None,
    devices=None,
    mesh=None,
    logdir="logs/resnet50",
    sync_batch_norm=False,
    mixed_precision=False,
    steps_per_epoch=None,
    validation_steps=None,
    checkpoint="1 epoch",
    seed=0,
    builder=None,
):
    """Trains, evaluates after each epoch, and returns the history.

    Args:
        preset: a `Preset`.
        folder: folder of JPEGs, see `data.Folder`, or None for the preset's tfds data set.
        replicas: devices of this machine to use; None for all. A machine without accelerators
            splits its CPU into that many.
        devices: as in `kr.ReplicatedTrainer`, where not all `replicas` are used.
        mesh: dict of a mesh's sizes, such as {"batch": 4, "model": 2}, instead of replicas: rows
            are split over "batch", the classes of the last layer over "model".
        logdir: folder of logs and checkpoints.
        sync_batch_norm: whether BatchNormalization sees the rows of all replicas.
        mixed_precision: whether to compute in bfloat16.
        steps_per_epoch: steps of an epoch; None for all data.
        validation_steps: steps of an evaluation; None for all data.
        checkpoint: how often the run is saved, as in `kr.callbacks.Checkpoint`.
        seed: seed of weights, order and augmentation.
        builder: a tfds builder instead of the preset's, for tests.

    Returns:
        Dict of lists, one entry per epoch.
    """
    if mesh is not None:
        replicas = math.prod(mesh.values())
    if replicas is not None and devices is None and not tf.config.list_physical_devices("GPU"):
        kr.simulate_devices(replicas)
    tfds.disable_progress_bar()
    if mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    is_small = preset.model != "resnet50"
    builder = builder or (None if folder else digits.builder(preset.dataset))
    channels, num_classes, source = 3, None, None
    if folder:
        source = data.Folder(folder)
        num_classes = len(source.classes)
    else:
        features = builder.info.features
        num_classes = features["label"].num_classes
        channels = features["image"].shape[-1] if is_small else 3

    # The trainer comes first: it connects the workers, which has to precede all TensorFlow work.
    trainer = kr.ReplicatedTrainer(
        lambda: build_model(
            preset.model,
            (preset.image_size, preset.image_size, channels),
            num_classes,
            0.0 if preset.optimizer == "lars" else preset.weight_decay,
        ),
        devices=devices or replicas,
        layout=None if mesh is None else kr.Layout(mesh, SPLIT_CLASSIFIER),
        seed=seed,
    )
    if builder is not None:
        digits.prepare(builder)
        source = None if is_small else data.FromTfds(builder)
    if is_small:
        training = data.small_images(builder, "train", preset.batch_size, preset.image_size, seed)
        held_out = data.small_images(builder, "test", preset.batch_size, preset.image_size)
    else:
        training = data.training_images(source, preset.batch_size, preset.image_size, seed)
        held_out = data.evaluation_images(source, preset.batch_size, preset.image_size)
    if steps_per_epoch is None:
        images = builder.info.splits["train"].num_examples if is_small else source.count("train")
        steps = -(-images // preset.batch_size)
    else:
        training, steps = training.repeat(), steps_per_epoch
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if num_classes > 5:
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5_accuracy"))
    trainer.compile(
        optimizer=make_optimizer(preset, steps),
        loss=SmoothedCrossentropy(preset.label_smoothing),
        metrics=metrics,
        sync_batch_norm=sync_batch_norm,
    )
    print(trainer.plan)
    history = trainer.fit(
        training,
        epochs=preset.epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=held_out,
        validation_steps=validation_steps,
        resume="auto",
        callbacks=[
            kr.callbacks.Throughput(),
            kr.callbacks.TensorBoard(logdir),
            kr.callbacks.Checkpoint(os.path.join(logdir, "checkpoints"), every=checkpoint),
        ],
    ).history
    if history.get("val_accuracy"):
        print(f"test accuracy: {history['val_accuracy'][-1]:.4f}")
    trainer.save(os.path.join(logdir, "model.keras"))
    return history


def parse_mesh(text):
    """Returns {"batch": 4, "model": 2} for "batch=4,model=2"."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="default: that of the model")
    parser.add_argument("--model", choices=("resnet50", "resnet20"), default="resnet50")
    parser.add_argument("--dataset", help="name of a tfds data set (default: the preset's)")
    parser.add_argument(
        "--folder", help="folder with train/<class>/*.jpg, validation/<class>/*.jpg"
    )
    parser.add_argument("--replicas", type=int, help="devices to use (default: all)")
    parser.add_argument(
        "--mesh", type=parse_mesh, help="such as batch=4,model=2: split the classifier over devices"
    )
    parser.add_argument("--batch-size", type=int, help="rows of a global batch")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--label-smoothing", type=float)
    parser.add_argument(
        "--sync-batch-norm",
        action="store_true",
        help="let BatchNormalization see the rows of all replicas",
    )
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bfloat16")
    parser.add_argument("--steps-per-epoch", type=int)
    parser.add_argument("--validation-steps", type=int)
    parser.add_argument("--checkpoint", default="1 epoch", help="how often: '10min', '500 steps'")
    parser.add_argument("--logdir", default="logs/resnet50")
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    preset = PRESETS[arguments.pop("preset") or arguments["model"]]
    del arguments["model"]
    changed = ("dataset", "batch_size", "epochs", "label_smoothing")
    given = {name: arguments.pop(name) for name in changed}
    given = {name: value for name, value in given.items() if value is not None}
    train(dataclasses.replace(preset, **given), **arguments)


if __name__ == "__main__":
    main()
