"""examples/resnet50: the networks and recipe against the published ones, and runs of the script."""

import dataclasses
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from resnet50 import data, model, train  # noqa: E402
from resnet50.lars import LARS  # noqa: E402
from resnet50.presets import PRESETS  # noqa: E402
from resnet50.recipe import Schedule, SmoothedCrossentropy, make_schedule  # noqa: E402

from tests.helpers import run_python  # noqa: E402


def count(weights):
    return sum(int(np.prod(weight.shape)) for weight in weights)


@pytest.fixture(scope="module")
def resnet50():
    return model.build_model("resnet50", (224, 224, 3), 1000)


def test_size_of_resnet50(resnet50):
    assert count(resnet50.trainable_weights) == 25_557_032
    assert count(resnet50.weights) == 25_610_152  # with the moving statistics
    assert resnet50.output_shape == (None, 1000)


def test_shape_of_v1_5(resnet50):
    convolutions = [layer for layer in resnet50.layers if isinstance(layer, keras.layers.Conv2D)]
    assert len(convolutions) == 53
    assert not any(layer.use_bias for layer in convolutions)
    # The stride is in the 3x3 of a block (and in its projection), never in its first 1x1.
    strided = [c.kernel_size[0] for c in convolutions if c.strides[0] == 2]
    assert sorted(strided) == [1, 1, 1, 3, 3, 3, 7]
    assert all(c.padding == "valid" for c in convolutions if c.strides[0] == 2)
    sides = [la.output.shape[1] for la in resnet50.layers if isinstance(la, keras.layers.Add)]
    assert sides == [56] * 3 + [28] * 4 + [14] * 6 + [7] * 3


def test_the_last_scale_of_each_block_starts_at_zero(resnet50):
    norms = [la for la in resnet50.layers if isinstance(la, keras.layers.BatchNormalization)]
    zero = [norm for norm in norms if not np.any(norm.gamma.numpy())]
    assert len(norms) == 53 and len(zero) == 16
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(0.9, 1e-5)}


def test_weight_decay_is_half_the_squares_without_normalization(resnet50):
    expected = 5e-5 * sum(
        float(tf.reduce_sum(tf.square(weight)))
        for weight in resnet50.trainable_weights
        if "batch_normalization" not in weight.path
    )
    assert float(tf.add_n(resnet50.losses)) == pytest.approx(expected, rel=1e-4)


def test_size_of_resnet20():
    small = model.build_model("resnet20", (32, 32, 1), 10, weight_decay=0.0)
    assert count(small.trainable_weights) == 272_186
    assert not small.losses
    assert sum(isinstance(layer, keras.layers.Conv2D) for layer in small.layers) == 19 + 2


def test_other_networks_are_refused():
    with pytest.raises(ValueError, match=r"`name` must be one of .* Received: name='vgg'"):
        model.build_model("vgg", (32, 32, 3), 10)


def test_learning_rate_of_the_recipe():
    schedule = make_schedule(PRESETS["resnet50"], 100)  # 100 steps an epoch, batch 1,024
    rates = [float(schedule(step)) for step in (0, 250, 500, 2999, 3000, 6000, 8000, 8999)]
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.4, 0.04, 4e-3, 4e-4, 4e-4], rtol=1e-5)


def test_learning_rate_of_large_batches():
    schedule = make_schedule(PRESETS["lars"], 100)
    rates = [float(schedule(step)) for step in (0, 250, 500, 4750, 9000)]
    np.testing.assert_allclose(rates, [0, 12.5, 25.0, 25.0 / 4, 0.0], rtol=1e-5)


def test_learning_rate_on_small_images():
    schedule = Schedule(0.2, 10, 110, "cosine")
    rates = [float(schedule(step)) for step in (0, 5, 10, 60, 110)]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.1, 0], atol=1e-6)
    assert Schedule.from_config(schedule.get_config()).get_config() == schedule.get_config()
    with pytest.raises(ValueError, match="`decay` must be .* Received: decay='linear'"):
        Schedule(0.1, 1, 2, "linear")


def test_lars_by_hand():
    kernel, bias = keras.Variable(np.full((2, 2), 2.0, "float32")), keras.Variable([1.0, 1.0])
    optimizer = LARS(0.5, momentum=0.9, decay=0.1, coefficient=0.01)
    gradients = [tf.ones((2, 2)), tf.ones(2)]
    velocity, weight = 0.0, 2.0
    for _ in range(2):
        optimizer.apply(gradients, [kernel, bias])
        trust = 0.01 * 2 * weight / (2.0 + 0.1 * 2 * weight)  # norms of four equal entries
        velocity = 0.9 * velocity + 0.5 * trust * (1 + 0.1 * weight)
        weight -= velocity
    np.testing.assert_allclose(kernel.numpy(), np.full((2, 2), weight), rtol=1e-6)
    np.testing.assert_allclose(bias.numpy(), [1 - 0.5 - 0.95] * 2, rtol=1e-6)
    again = LARS.from_config(optimizer.get_config())
    assert again.get_config() == optimizer.get_config()


def test_smoothed_crossentropy():
    logits, labels = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 1, 2, 1, 0])
    targets = 0.9 * np.eye(3)[labels] + 0.1 / 3
    log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    expected = -(targets * log).sum(1).mean()
    loss = SmoothedCrossentropy(0.1)
    assert float(loss(labels, logits.astype("float32"))) == pytest.approx(expected, rel=1e-5)
    assert SmoothedCrossentropy.from_config(loss.get_config()).smoothing == 0.1


def jpeg(height, width, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype("uint8")
    return tf.io.encode_jpeg(pixels)


def test_training_images_are_random_parts():
    encoded = jpeg(300, 400)
    parts = [data.distorted(encoded, 64, tf.constant([number, 7], tf.int64)) for number in range(4)]
    assert all(part.shape == (64, 64, 3) for part in parts)
    assert not np.allclose(parts[0], parts[1])
    np.testing.assert_array_equal(
        parts[0], data.distorted(encoded, 64, tf.constant([0, 7], "int64"))
    )


def test_evaluation_takes_the_centre():
    pixels = np.zeros((256, 512, 3), "uint8")
    pixels[16:240, 144:368] = 255  # the central square of 224
    image = data.centred(tf.io.encode_jpeg(pixels, quality=100), 224)
    assert image.shape == (224, 224, 3)
    assert float(tf.reduce_mean(image)) > 253
    np.testing.assert_allclose(
        data.scaled(tf.fill((1, 1, 3), 255.0))[0, 0], [2.2489, 2.4286, 2.64], atol=1e-3
    )


@pytest.fixture
def folder(tmp_path):
    for split, number in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for index in range(number):
                (place / f"{index}.jpg").write_bytes(jpeg(90, 70 + index, index).numpy())
    return tmp_path / "images"


def test_a_folder_of_jpegs(folder):
    source = data.Folder(folder)
    assert source.classes == ["cat", "dog"]
    assert (source.count("train"), source.count("validation")) == (12, 4)
    orders = []
    for seed in (1, 1, 2):
        batches = list(data.training_images(source, 5, 32, seed))
        assert [images.shape[0] for images, _ in batches] == [5, 5, 2]
        orders.append(np.concatenate([labels for _, labels in batches]))
        assert sorted(orders[-1]) == [0] * 6 + [1] * 6
    np.testing.assert_array_equal(orders[0], orders[1])
    ((_, labels),) = data.evaluation_images(source, 8, 32)
    assert labels.numpy().tolist() == [0, 0, 1, 1]


def test_a_folder_without_classes_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="train/<class>/.* Received: "):
        data.Folder(tmp_path)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(ValueError, match="no JPEGs in .* Received: "):
        data.Folder(tmp_path)


def test_resnet50_trains_on_mock_imagenet(tmp_path):
    """224 x 224, through JPEGs, crops and the recipe, on two replicas; evaluated and saved."""
    preset = dataclasses.replace(PRESETS["resnet50"], batch_size=4, epochs=1, label_smoothing=0.1)
    with tfds.testing.mock_data(num_examples=8):
        history = train.train(
            preset,
            devices=2,
            builder=tfds.builder("imagenet2012"),
            steps_per_epoch=2,
            validation_steps=1,
            logdir=str(tmp_path),
        )
    assert np.isfinite(history["loss"]).all() and np.isfinite(history["val_loss"]).all()
    assert {"accuracy", "top_5_accuracy", "val_accuracy", "rows_per_second"} <= set(history)
    assert list((tmp_path / "checkpoints").iterdir()) and (tmp_path / "model.keras").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "resnet50"])
def test_a_split_classifier_equals_one_device(name, tmp_path):
    """Small images on a mesh of 2 x 2: classes over "model", statistics of all rows."""
    dataset = {"resnet20": "fashion_mnist", "resnet50": "imagenet2012"}[name]
    preset = dataclasses.replace(
        PRESETS[name], dataset=dataset, batch_size=6, image_size=32, epochs=1
    )
    histories = []
    for options in ({"mesh": {"batch": 2, "model": 2}}, {}):
        keras.backend.clear_session()
        with tfds.testing.mock_data(num_examples=12):
            histories.append(
                train.train(
                    preset,
                    devices=4 if options else 1,
                    builder=tfds.builder(dataset),
                    steps_per_epoch=2,
                    validation_steps=1,
                    logdir=str(tmp_path / f"{len(histories)}"),
                    **options,
                )
            )
    on_mesh, on_one = histories
    names = {name for name in on_one if "second" not in name and "share" not in name}
    assert {"loss", "accuracy", "val_loss"} <= names <= set(on_mesh)
    for name in names:
        np.testing.assert_allclose(on_mesh[name], on_one[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(
    not train.digits.FASHION_MNIST_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_one_and_four_replicas_learn_alike(tmp_path):
    """ResNet-20 on global batches of 64: equal curves where BatchNormalization sees all rows."""
    histories = []
    for devices in (1, 4):
        keras.backend.clear_session()
        histories.append(
            train.train(
                PRESETS["resnet20"],
                devices=devices,
                sync_batch_norm=True,
                steps_per_epoch=20,
                validation_steps=4,
                logdir=str(tmp_path / f"{devices}"),
            )
        )
    one, four = histories
    assert one["loss"][-1] < one["loss"][0] - 0.3
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(four[name], one[name], rtol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_script_trains_from_a_folder_and_resumes(folder, tmp_path):
    def run(epochs):
        return run_python(
            *(str(EXAMPLES / "resnet50" / "train.py"), "--folder", str(folder), "--replicas", "2"),
            *("--batch-size", "4", "--epochs", str(epochs), "--steps-per-epoch", "1"),
            *("--validation-steps", "1", "--logdir", str(tmp_path / "logs")),
            timeout=280,
        )

    first = run(1)
    assert first.returncode == 0, first.stdout
    assert re.search(r"^test accuracy: [01]\.\d{4}$", first.stdout, re.MULTILINE)
    assert re.search(r"replicas +2\b", first.stdout)
    second = run(2)
    assert second.returncode == 0, second.stdout
    assert "Resumed from" in second.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not train.digits.FASHION_MNIST_FOLDER.is_dir(), reason="needs Debian's dataset-fashion-mnist"
)
def test_resnet20_learns_fashion_mnist(tmp_path):
    result = run_python(
        *(str(EXAMPLES / "resnet50" / "train.py"), "--model", "resnet20", "--replicas", "2"),
        *("--epochs", "1", "--steps-per-epoch", "120", "--logdir", str(tmp_path)),
        timeout=280,
    )
    assert result.returncode == 0, result.stdout
    (accuracy,) = re.findall(r"^test accuracy: (\d\.\d{4})$", result.stdout, re.MULTILINE)
    assert float(accuracy) > 0.6
