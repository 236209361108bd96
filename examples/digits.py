"""Real images without a network: two small tfds builders.

`Digits` serves the 1,797 hand-written digits of 8 x 8 pixels that come with
scikit-learn; `LocalFashionMNIST` serves the Fashion-MNIST files that Debian's package
`dataset-fashion-mnist` installs, in the form of tfds' own `fashion_mnist`.

    builder = digits.builder("digits")          # or "fashion_mnist", or any name that tfds knows
    digits.prepare(builder)
    train = builder.as_dataset(split="train", as_supervised=True)
"""

import pathlib
import random

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.image_classification import mnist

FASHION_MNIST_FOLDER = pathlib.Path("/usr/share/datasets/fashion-mnist")
SPLIT_SEED = 0
TEST_SHARE = 0.2


class Digits(tfds.core.GeneratorBasedBuilder):
    """scikit-learn's hand-written digits, split 80 to 20, each digit in the same shares.

    The images were collected for "Optical Recognition of Handwritten Digits" (UCI machine
    learning repository, its test set). Their 17 grey levels, 0 to 16, are stretched to 0 to 255.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "1,437 training and 360 test images."}

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="1,797 hand-written digits, 8 x 8 pixels, as shipped with scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # nothing to download
        # Imported here: reading a prepared data set does not need scikit-learn.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, labels = load_digits(return_X_y=True)
        images = np.round(images * (255 / 16)).astype("uint8").reshape(-1, 8, 8, 1)
        train, test = train_test_split(
            np.arange(len(labels)), test_size=TEST_SHARE, random_state=SPLIT_SEED, stratify=labels
        )
        return {
            "train": self._generate_examples(images, labels, train),
            "test": self._generate_examples(images, labels, test),
        }

    def _generate_examples(self, images, labels, rows):
        for row in rows:
            yield int(row), {"image": images[row], "label": int(labels[row])}


class LocalFashionMNIST(mnist.FashionMNIST, skip_registration=True):
    """tfds' Fashion-MNIST, read from the files of a Debian package instead of the network."""

    name = "fashion_mnist"

    def _split_generators(self, dl_manager):
        files = {
            name: FASHION_MNIST_FOLDER / f"{name}-ubyte.gz"
            for name in (
                "train-images-idx3",
                "train-labels-idx1",
                "t10k-images-idx3",
                "t10k-labels-idx1",
            )
        }
        files = dl_manager.extract(files)
        return [
            tfds.core.SplitGenerator(
                name=split,
                gen_kwargs={
                    "num_examples": num_examples,
                    "data_path": files[f"{prefix}-images-idx3"],
                    "label_path": files[f"{prefix}-labels-idx1"],
                },
            )
            for split, prefix, num_examples in (
                (tfds.Split.TRAIN, "train", 60_000),
                (tfds.Split.TEST, "t10k", 10_000),
            )
        ]


def builder(name):
    """Returns the tfds builder of a data set.

    Args:
        name: `"digits"`, `"fashion_mnist"` (from local files where Debian's package has
            installed them), or any name that tfds knows, such as `"mnist"` or `"cifar10"`.

    Returns:
        A `tfds.core.DatasetBuilder`. Nothing has been prepared or read yet.
    """
    if name == "digits":
        return Digits()
    if name == "fashion_mnist" and FASHION_MNIST_FOLDER.is_dir():
        return LocalFashionMNIST()
    return tfds.builder(name)


def prepare(dataset_builder):
    """Writes the data set to tfds' folder, unless it is there.

    Several workers of one machine may call this at the same time: each writes to a folder
    of its own, and the first to finish gives it the final name.

    Args:
        dataset_builder: a `tfds.core.DatasetBuilder`.
    """
    state = random.getstate()
    random.seed()  # tfds names its temporary folder at random, and workers share their seed
    try:
        dataset_builder.download_and_prepare()
    except OSError:
        if not _is_prepared(dataset_builder):
            raise
    finally:
        random.setstate(state)


def _is_prepared(dataset_builder):
    return (pathlib.Path(dataset_builder.data_dir) / "dataset_info.json").exists()
