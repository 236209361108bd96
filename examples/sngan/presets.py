"""The published configurations, and one that a CPU can train.

preset = PRESETS["cifar10"]
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Preset:
    """A data set, two networks and a recipe.

    Attributes:
        dataset: name of the tfds data set.
        image_shape: `(height, width, channels)` that the networks see.
        num_classes: number of classes.
        first_channels: channels of the 4 x 4 image that the latents are mapped to.
        generator_channels: channels behind each up-block; each doubles height and width.
        first_discriminator_channels: channels behind the first block, which halves the image.
        down_channels: channels behind each block that halves the image.
        flat_channels: channels behind each block that keeps its size.
        batch_size: rows of each discriminator update, over all replicas.
        updates: number of generator updates.
        decay_from: generator update from which the learning rate falls linearly, to 0 at the end.
        latent_size: length of a latent vector.
        discriminator_updates: discriminator updates for each generator update.
        generator_samples: samples of a generator update, as a multiple of the rows.
        learning_rate: of Adam, for both networks.
        beta_1: of Adam.
        beta_2: of Adam.
    """

    dataset: str
    image_shape: tuple
    num_classes: int
    first_channels: int
    generator_channels: tuple
    first_discriminator_channels: int
    down_channels: tuple
    flat_channels: tuple
    batch_size: int
    updates: int
    decay_from: int
    latent_size: int = 128
    discriminator_updates: int = 5
    generator_samples: int = 2
    learning_rate: float = 2e-4
    beta_1: float = 0.0
    beta_2: float = 0.9


PRESETS = {
    # Miyato & Koyama 2018 (arXiv 1802.05637): 4 GPUs with 16 rows each.
    "imagenet128": Preset(
        dataset="imagenet2012",
        image_shape=(128, 128, 3),
        num_classes=1000,
        first_channels=1024,
        generator_channels=(1024, 512, 256, 128, 64),
        first_discriminator_channels=64,
        down_channels=(128, 256, 512, 1024),
        flat_channels=(1024,),
        batch_size=64,
        updates=450_000,
        decay_from=400_000,
    ),
    # Miyato et al. 2018 (arXiv 1802.05957), table 4, with class labels by projection.
    "cifar10": Preset(
        dataset="cifar10",
        image_shape=(32, 32, 3),
        num_classes=10,
        first_channels=256,
        generator_channels=(256, 256, 256),
        first_discriminator_channels=128,
        down_channels=(128,),
        flat_channels=(128, 128),
        batch_size=64,
        updates=50_000,
        decay_from=0,
    ),
    # The same blocks with few channels, for minutes on two CPU cores: half the rows, and five times
    # the learning rate, since the run is that short.
    "fashion_mnist32": Preset(
        dataset="fashion_mnist",
        image_shape=(32, 32, 1),
        num_classes=10,
        first_channels=64,
        generator_channels=(64, 32, 16),
        first_discriminator_channels=16,
        down_channels=(32, 64),
        flat_channels=(64,),
        batch_size=32,
        updates=1_200,
        decay_from=0,
        learning_rate=1e-3,
    ),
    # A minute, to see that everything runs; its pictures show nothing.
    "smoke": Preset(
        dataset="digits",
        image_shape=(32, 32, 1),
        num_classes=10,
        first_channels=8,
        generator_channels=(8, 8, 8),
        first_discriminator_channels=8,
        down_channels=(8,),
        flat_channels=(8,),
        batch_size=10,
        updates=6,
        decay_from=0,
        latent_size=8,
        discriminator_updates=2,
    ),
}
