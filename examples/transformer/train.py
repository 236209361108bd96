"""Trains a small language model on the text of this repository, split over a mesh of devices.

    python examples/transformer/train.py --mesh batch=1,model=2     # tensor parallel on 2 devices
    python examples/transformer/train.py --mesh batch=2,model=2     # and data parallel
    python examples/transformer/train.py                            # the same numbers on one
    keras-replicator launch --workers 2 examples/transformer/train.py --mesh batch=2,model=2
    keras-replicator plan examples/transformer/train.py --mesh batch=2,model=4   # memory, no run

The weights are split by `kr.auto_layout`: attention by heads, MLPs by columns and rows, the
embedding by features. Only the line `layout=` knows about it.
"""

import argparse
import math
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # examples/

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_replicator as kr  # noqa: E402
from transformer.data import Vocabulary, read_text, sequences  # noqa: E402
from transformer.model import build_model  # noqa: E402


def train(mesh=None, epochs=5, batch_size=32, length=64, width=64, blocks=2, logdir=None, seed=0):
    """Trains, and returns the history.

    Args:
        mesh: dict of the mesh's sizes, or None: one device.
        epochs: number of epochs.
        batch_size: rows of an update, over the whole mesh.
        length: characters of a sequence.
        width: features of a token.
        blocks: number of blocks.
        logdir: folder of logs and checkpoints, from which a run goes on, or None.
        seed: seed of weights, dropout and order.

    Returns:
        Dict of lists, one entry per epoch.
    """
    if mesh is not None and not tf.config.list_physical_devices("GPU"):
        kr.simulate_devices(math.prod(mesh.values()))
    text = read_text()
    vocabulary = Vocabulary(text)
    x, y = sequences(vocabulary.encode(text), length)

    trainer = kr.ReplicatedTrainer(
        lambda: build_model(vocabulary.size, length, width, blocks=blocks, seed=seed),
        layout=None if mesh is None else kr.Layout(mesh, "auto"),
        devices=1 if mesh is None else None,
        seed=seed,
    )
    trainer.compile(
        keras.optimizers.AdamW(2e-3, weight_decay=0.01, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    print(trainer.plan)
    callbacks = [kr.callbacks.Throughput()]
    if logdir is not None:
        callbacks += [
            kr.callbacks.TensorBoard(logdir),
            kr.callbacks.Checkpoint(os.path.join(logdir, "checkpoints"), every="1 epoch"),
        ]
    history = trainer.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        validation_split=0.1,
        verbose=2,
        callbacks=callbacks,
        resume=None if logdir is None else "auto",
    ).history
    print("sample:", repr(sample(trainer, vocabulary, text[:length], characters=40)))
    print(
        f"training loss: {history['loss'][-1]:.4f}  validation loss: {history['val_loss'][-1]:.4f}"
    )
    return history


def sample(trainer, vocabulary, start, characters):
    """Goes on with a text, taking the likeliest character each time."""
    window = list(vocabulary.encode(start))
    length = len(window)
    for _ in range(characters):
        logits = trainer.predict_on_batch(np.array([window[-length:]], "int32"))
        window.append(int(logits[0, -1, : len(vocabulary.characters)].argmax()))
    return vocabulary.decode(window[length:])


def parse_mesh(text):
    """Returns {"batch": 2, "model": 4} for "batch=2,model=4"."""
    return {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}


def parse_arguments(arguments=None):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--mesh", type=parse_mesh, help="such as batch=2,model=2; one device if not"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--logdir")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    train(**vars(parse_arguments()))
