"""Trains a small convolutional network on real images, on every device of this machine.

    python examples/quickstart.py                                     # digits, all devices
    python examples/quickstart.py --replicas 4                        # the same numbers
    python examples/quickstart.py --dataset fashion_mnist --epochs 3  # or another tfds name

The lines that make it replicated are `kr.ReplicatedTrainer(...)` and what is called on it; the
rest is plain Keras. Started as several workers (TF_CONFIG, Slurm, `keras-replicator launch`), the
same script trains one model on all of them; `--replicas` then counts the devices of each worker.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits  # noqa: E402 - examples/digits.py
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_datasets as tfds  # noqa: E402

import keras_replicator as kr  # noqa: E402

SEED = 1
SHUFFLE_ROWS = 10_000


def build_model(image_shape, num_classes):
    """Returns a network of 4 convolutions for small images.

    Smooth activations and strides instead of maxima keep the training from magnifying rounding,
    so that runs on different numbers of replicas stay equal to many digits.

    Args:
        image_shape: `(height, width, channels)`.
        num_classes: number of outputs (logits).
    """
    convolution = {"padding": "same", "activation": "silu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Rescaling(1 / 127.5, offset=-1),
            keras.layers.Conv2D(32, 3, **convolution),
            keras.layers.Conv2D(64, 3, strides=2, **convolution),
            keras.layers.Conv2D(64, 3, **convolution),
            keras.layers.Conv2D(64, 3, strides=2, **convolution),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="silu", kernel_initializer="he_normal"),
            keras.layers.Dense(num_classes),
        ]
    )


def shift(example, seed):
    """Moves an image by up to one pixel in each direction."""
    image, label = example
    padded = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
    return tf.image.stateless_random_crop(padded, tf.shape(image), seed), label


def training_data(builder, batch_size):
    """Returns the training images as global batches, shuffled anew each epoch from one seed."""
    images = builder.as_dataset(split="train", as_supervised=True).cache()
    images = images.shuffle(SHUFFLE_ROWS, seed=SEED)
    seeds = tf.data.Dataset.random(seed=SEED, rerandomize_each_iteration=True).batch(2)
    return tf.data.Dataset.zip(images, seeds).map(shift).batch(batch_size).prefetch(2)


def test_data(builder, batch_size):
    """Returns the test images as global batches."""
    return builder.as_dataset(split="test", as_supervised=True).batch(batch_size).cache()


def train(dataset="digits", replicas=None, batch_size=64, epochs=15, logdir="logs/quickstart"):
    """Trains, evaluates and prints the result.

    Args:
        dataset: "digits", or the name of a tfds data set of images of one size with labels.
        replicas: number of devices of this machine to use; None for all. A machine without
            accelerators splits its CPU into that many.
        batch_size: rows of a global batch, over all replicas.
        epochs: number of epochs.
        logdir: folder for TensorBoard, or None.

    Returns:
        `(accuracy, loss)` on the test images.
    """
    if replicas is not None and not tf.config.list_physical_devices("GPU"):
        kr.simulate_devices(replicas)
    tfds.disable_progress_bar()
    builder = digits.builder(dataset)
    features = builder.info.features

    # The trainer comes first: it connects the workers, which has to precede all TensorFlow work.
    trainer = kr.ReplicatedTrainer(
        lambda: build_model(features["image"].shape, features["label"].num_classes),
        devices=replicas,
        seed=SEED,
    )
    digits.prepare(builder)
    steps = -(-builder.info.splits["train"].num_examples // batch_size) * epochs
    trainer.compile(
        optimizer=keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.05, steps), momentum=0.9, nesterov=True
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    print(trainer.plan)

    callbacks = [kr.callbacks.Throughput()]
    if logdir:
        callbacks.append(kr.callbacks.TensorBoard(logdir))
    test = test_data(builder, batch_size)
    history = trainer.fit(
        training_data(builder, batch_size),
        epochs=epochs,
        validation_data=test,
        callbacks=callbacks,
    )
    loss, accuracy = trainer.evaluate(test, verbose=0)
    print(f"rows per second in the last epoch: {history.history['rows_per_second'][-1]:,.0f}")
    print(f"test accuracy: {accuracy:.4f}  test loss: {loss:.4f}")
    return accuracy, loss


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dataset", default="digits", help="digits, or a name that tfds knows")
    parser.add_argument("--replicas", type=int, help="devices to use (default: all)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows over all replicas")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--logdir", default="logs/quickstart", help="folder for TensorBoard")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
