"""Policy, critic and the torso for images, as in DeepMind's open agent.

models = build_models(config, environment.spec, seed=0)
actions = models["policy"](models["torso"](images))          # in -1 to 1; no torso for states
logits = models["critic"]([features, actions])               # [rows, atoms]
"""

import keras
from keras import layers


def _uniform():
    return keras.initializers.VarianceScaling(0.333, mode="fan_out", distribution="uniform")


def _layer_norm_mlp(x, sizes):
    """Linear, LayerNorm, tanh; then linear layers, each with ELU."""
    x = layers.Dense(sizes[0], kernel_initializer=_uniform())(x)
    x = layers.Activation("tanh")(layers.LayerNormalization(epsilon=1e-5)(x))
    for size in sizes[1:]:
        x = layers.Dense(size, activation="elu", kernel_initializer=_uniform())(x)
    return x


def build_policy(features_size, action_size, sizes):
    """Returns the model `features [rows, n] -> actions [rows, m]` in -1 to 1.

    Args:
        features_size: n.
        action_size: m.
        sizes: units of the layers.
    """
    features = keras.Input((features_size,), name="features")
    near_zero = keras.initializers.VarianceScaling(1e-4)
    actions = layers.Dense(action_size, activation="tanh", kernel_initializer=near_zero)(
        _layer_norm_mlp(features, sizes)
    )
    return keras.Model(features, actions, name="policy")


def build_critic(features_size, action_size, sizes, atoms):
    """Returns the model `[features [rows, n], actions [rows, m]] -> logits [rows, atoms]`.

    Args:
        features_size: n.
        action_size: m.
        sizes: units of the layers.
        atoms: number of atoms.
    """
    features = keras.Input((features_size,), name="features")
    actions = keras.Input((action_size,), name="actions")
    x = _layer_norm_mlp(layers.Concatenate()([features, actions]), sizes)
    return keras.Model([features, actions], layers.Dense(atoms)(x), name="critic")


def build_torso(image_shape, channels=(16, 32, 32), size=256):
    """Returns the model `images [rows, height, width, channels] -> features [rows, size]`.

    The residual network of IMPALA (Espeholt et al. 2018, arXiv 1802.01561, figure 3), two
    residual blocks for each entry of `channels`.

    Args:
        image_shape: `(height, width, channels)` of uint8 images.
        channels: channels of each part, which halves height and width.
        size: units of the last layer.
    """
    images = keras.Input(image_shape, dtype="uint8", name="images")
    x = layers.Rescaling(1 / 255)(images)
    for number in channels:
        x = layers.Conv2D(number, 3, padding="same")(x)
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
        for _ in range(2):
            shortcut = x
            for _ in range(2):
                x = layers.Conv2D(number, 3, padding="same")(layers.ReLU()(x))
            x = x + shortcut
    x = layers.Dense(size, activation="relu")(layers.Flatten()(layers.ReLU()(x)))
    return keras.Model(images, x, name="torso")


def build_models(config, spec, seed=None):
    """Returns the dict of models that the learner trains.

    "policy" and "critic", for images also "torso", and their targets "target_policy",
    "target_critic", "target_torso", which begin with the same weights.

    Args:
        config: a `Config`.
        spec: the `Spec` of the environment.
        seed: seed of the initial weights, or None.
    """
    if seed is not None:
        keras.utils.set_random_seed(seed)
    models = {}
    for prefix in ("", "target_"):
        features_size = spec.observation_shape[0]
        if config.pixels:
            models[prefix + "torso"] = torso = build_torso(spec.observation_shape)
            features_size = torso.output_shape[-1]
        models[prefix + "policy"] = build_policy(
            features_size, spec.action_size, config.policy_sizes
        )
        models[prefix + "critic"] = build_critic(
            features_size, spec.action_size, config.critic_sizes, config.atoms
        )
    for name in [name for name in models if not name.startswith("target_")]:
        models["target_" + name].set_weights(models[name].get_weights())
    return models
