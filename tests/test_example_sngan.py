"""examples/sngan: the networks against the published ones, and a smoke run of the script."""

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from sngan import data, metrics, model, step  # noqa: E402
from sngan.presets import PRESETS  # noqa: E402
from sngan.spectral import SpectralNormalization  # noqa: E402

SMOKE = PRESETS["smoke"]


@pytest.mark.parametrize(
    "name, generator, discriminator",
    [
        # 128 -> 4 x 4 x 1024 and five up-blocks; 42.0 and 39.4 million.
        ("imagenet128", 41_996_931, 39_443_137),
        ("cifar10", 4_304_387, 1_055_105),
    ],
)
def test_sizes_of_the_published_networks(name, generator, discriminator):
    preset = PRESETS[name]
    models = model.build_models(preset)
    assert models["generator"].output_shape == (None, *preset.image_shape)
    assert models["discriminator"].output_shape == (None,)
    sizes = {
        name: sum(int(np.prod(weight.shape)) for weight in part.trainable_weights)
        for name, part in models.items()
    }
    assert sizes == {"generator": generator, "discriminator": discriminator}


def test_the_generator_has_no_spectral_and_the_discriminator_no_batch_normalization():
    models = model.build_models(SMOKE)
    kinds = {name: {type(layer) for layer in part.layers} for name, part in models.items()}
    assert SpectralNormalization not in kinds["generator"]
    assert model.ConditionalBatchNormalization not in kinds["discriminator"]
    weighted = [layer for layer in models["discriminator"].layers if layer.trainable_weights]
    assert all(isinstance(layer, SpectralNormalization) for layer in weighted)


@pytest.mark.parametrize(
    "layer, inputs",
    [
        (keras.layers.Dense(6, use_bias=False), np.random.rand(4, 5)),
        (keras.layers.Conv2D(6, 3, use_bias=False), np.random.rand(2, 5, 5, 3)),
        (keras.layers.Embedding(7, 6), np.arange(4)),
    ],
)
def test_power_iterations_reach_the_largest_singular_value(layer, inputs):
    normalized = SpectralNormalization(layer)
    inputs = tf.constant(inputs, "int32" if inputs.ndim == 1 else "float32")
    for _ in range(200):
        output = normalized(inputs, training=True)
    weight = normalized.weight.numpy()
    sigma = np.linalg.svd(weight.reshape(-1, weight.shape[-1]), compute_uv=False)[0]
    np.testing.assert_allclose(output, layer(inputs) / sigma, rtol=1e-3, atol=1e-5)


def test_one_power_iteration_per_training_call_and_none_is_kept_otherwise():
    normalized = SpectralNormalization(keras.layers.Dense(3))
    x = tf.ones((2, 4))
    normalized(x)
    before = normalized.u.numpy()
    normalized(x, training=False)
    np.testing.assert_array_equal(normalized.u.numpy(), before)
    normalized(x, training=True)
    weight = normalized.weight.numpy()
    v = before @ weight.T
    v /= np.linalg.norm(v)
    u = v @ weight
    np.testing.assert_allclose(normalized.u.numpy(), u / np.linalg.norm(u), rtol=1e-5)


def test_the_gradient_takes_u_and_v_as_constants():
    normalized = SpectralNormalization(keras.layers.Dense(3, use_bias=False))
    x = tf.constant(np.random.rand(2, 4), "float32")
    normalized(x, training=True)
    u = normalized.u.numpy()
    weight = normalized.weight.numpy()
    v = u @ weight.T
    v /= np.linalg.norm(v)
    u = v @ weight
    u /= np.linalg.norm(u)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(normalized(x))
    gradient = tape.gradient(loss, normalized.weight)
    with tf.GradientTape() as tape:
        variable = tf.Variable(weight)
        expected = tf.reduce_sum(x @ variable / tf.reduce_sum(v @ variable * u))
    np.testing.assert_allclose(gradient, tape.gradient(expected, variable), rtol=1e-4, atol=1e-6)


def test_conditional_batch_normalization_scales_by_class():
    layer = model.ConditionalBatchNormalization(3)
    x = tf.constant(np.random.rand(4, 2, 2, 5), "float32")
    labels = tf.constant([0, 1, 1, 2])
    plain = layer(x, labels, training=True)
    np.testing.assert_allclose(np.mean(plain, (0, 1, 2)), np.zeros(5), atol=1e-5)
    layer.gamma.embeddings.assign([[1.0] * 5, [2.0] * 5, [3.0] * 5])
    layer.beta.embeddings.assign([[0.0] * 5, [1.0] * 5, [0.0] * 5])
    scaled = layer(x, labels, training=True)
    factor, offset = np.array([1, 2, 2, 3.0]), np.array([0, 1, 1, 0.0])
    expected = plain * factor[:, None, None, None] + offset[:, None, None, None]
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)


def test_a_step_updates_the_discriminator_several_times_for_each_generator_update():
    models = model.build_models(SMOKE, seed=0)
    optimizers = step.make_optimizers(SMOKE)
    train_step = step.make_train_step(SMOKE, lambda: optimizers)
    images = np.random.rand(3, SMOKE.discriminator_updates, *SMOKE.image_shape)
    labels = np.zeros((3, SMOKE.discriminator_updates), "int32")
    logs = train_step(models, {"image": tf.constant(images, "float32"), "label": labels})
    assert np.isfinite(logs["discriminator_loss"]) and np.isfinite(logs["generator_loss"])
    assert int(optimizers["discriminator"].iterations.numpy()) == SMOKE.discriminator_updates
    assert int(optimizers["generator"].iterations.numpy()) == 1


def test_the_learning_rate_falls_linearly_to_zero():
    decay = step.LinearDecay(0.2, 400, 450)
    rates = [float(decay(number)) for number in (0, 400, 425, 450, 500)]
    np.testing.assert_allclose(rates, [0.2, 0.2, 0.1, 0, 0], atol=1e-7)
    optimizers = step.make_optimizers(PRESETS["imagenet128"])
    assert optimizers["generator"].get_config()["learning_rate"]["config"] == {
        "learning_rate": 2e-4,
        "begin": 400_000,
        "end": 450_000,
    }


def test_images_are_scaled_with_noise_and_padded_or_cropped():
    seed = tf.constant([1, 2], tf.int64)
    small = data.prepare_image(tf.fill((28, 28, 1), tf.constant(255, tf.uint8)), (32, 32, 1), seed)
    assert small.shape == (32, 32, 1)
    noise = small.numpy() + 1 - np.pad(np.full((28, 28), 255 / 128), 2)[..., None]
    assert 0 <= noise.min() and noise.max() <= 1 / 128 + 1e-6 and noise.std() > 1e-3
    wide = data.prepare_image(tf.zeros((300, 400, 3), tf.uint8), (128, 128, 3), seed)
    assert wide.shape == (128, 128, 3)


def test_frechet_distance_of_normal_features():
    random = np.random.default_rng(0)
    one = random.normal(size=(20_000, 3))
    assert metrics.frechet_distance(one, one) == pytest.approx(0, abs=1e-6)
    # Means 2 apart in one direction, standard deviations 1 and 3: 4 + 3 * (3 - 1)^2.
    other = 3 * random.normal(size=(20_000, 3)) + [2, 0, 0]
    assert metrics.frechet_distance(one, other) == pytest.approx(16, rel=0.05)


def test_scores_of_a_perfect_and_of_an_undecided_classifier():
    labels = np.arange(100) % 10
    perfect = 50.0 * np.eye(10)[labels]
    assert metrics.inception_score(perfect) == pytest.approx(10, rel=1e-3)
    assert metrics.inception_score(np.zeros((100, 10))) == pytest.approx(1)
    share, shares = metrics.recognition(perfect, labels, 10)
    assert share == 1 and shares.tolist() == [1.0] * 10
    share, shares = metrics.recognition(np.roll(perfect, 1, axis=1), labels, 10)
    assert share == 0


def smoke_run(folder, updates):
    """Trains the smoke preset to a number of updates."""
    result = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "sngan" / "train.py"),
            *("--preset", "smoke", "--replicas", "2", "--samples", "50"),
            *("--steps", str(updates), "--evaluations", str(updates)),
            *("--classifier-epochs", "1", "--logdir", str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.multiprocess
def test_smoke_run(tmp_path):
    output = smoke_run(tmp_path, 2).stdout
    assert re.search(r"^Fréchet distance: [\d.]+  after the first tenth: ", output, re.MULTILINE)
    assert re.search(r"^recognised: [\d.]+  worst class: ", output, re.MULTILINE)
    assert (tmp_path / "samples.png").exists() and (tmp_path / "curve.png").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_smoke_run_resumes(tmp_path):
    smoke_run(tmp_path, 2)
    assert "Resumed from" in smoke_run(tmp_path, 3).stderr
