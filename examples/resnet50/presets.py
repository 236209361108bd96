"""Configurations: the published recipe for ImageNet, its large-batch variant, and one for a CPU."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model, its data and its recipe.

    Attributes:
        model: "resnet50" or "resnet20".
        dataset: name of a tfds data set.
        image_size: pixels of a side.
        batch_size: rows of a global batch.
        epochs: number of epochs.
        optimizer: "sgd" (Nesterov momentum 0.9) or "lars".
        learning_rate: for a batch of 256 rows (sgd), or the peak (lars).
        warmup_epochs: epochs in which the rate rises from 0, step by step.
        decay: "steps" (times 0.1 at each of `boundaries`), "polynomial" (power 2) or "cosine".
        boundaries: epochs at which the rate falls.
        weight_decay: factor of half the squared weights, without those of BatchNormalization.
        label_smoothing: share of the target that all classes divide.
    """

    model: str
    dataset: str
    image_size: int
    batch_size: int
    epochs: int
    optimizer: str = "sgd"
    learning_rate: float = 0.1
    warmup_epochs: float = 5
    decay: str = "steps"
    boundaries: tuple = (30, 60, 80)
    weight_decay: float = 1e-4
    label_smoothing: float = 0.0


PRESETS = {
    # Goyal et al. (arXiv 1706.02677) and the TPU implementation of its time.
    "resnet50": Preset("resnet50", "imagenet2012", 224, 1024, 90),
    # You et al. (arXiv 1708.03888), with the rates of the open implementations of its time.
    "lars": Preset(
        "resnet50",
        "imagenet2012",
        224,
        16_384,
        90,
        optimizer="lars",
        learning_rate=25.0,
        decay="polynomial",
        label_smoothing=0.1,
    ),
    # He et al. (arXiv 1512.03385, section 4.2): 20 layers for images of 32 x 32.
    "resnet20": Preset(
        "resnet20",
        "fashion_mnist",
        32,
        64,
        3,
        learning_rate=0.4,
        warmup_epochs=0.25,
        decay="cosine",
    ),
    "smoke": Preset("resnet20", "fashion_mnist", 32, 32, 1, warmup_epochs=0.1, decay="cosine"),
}
