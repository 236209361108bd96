"""kr.callbacks.TensorBoard: what it writes, read back from the event files."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar import layout_pb2

import keras_replicator as kr
from keras_replicator.callbacks import dashboards
from keras_replicator.callbacks.tensorboard import image_grid


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def data(rows=12):
    x = np.ones((rows, 2), "float32")
    return x, x[:, :1]


def written(folder):
    """Returns `{tag: [(step, value)]}` of a folder of event files."""
    reader = event_accumulator.EventAccumulator(
        str(folder), size_guidance={event_accumulator.TENSORS: 0}
    )
    reader.Reload()
    return {
        tag: [(event.step, tf.make_ndarray(event.tensor_proto)) for event in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
    }


def fit(callback, epochs=2, trainer=None, **arguments):
    if trainer is None:
        trainer = build()
        trainer.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    return trainer.fit(
        *data(),
        batch_size=4,
        epochs=epochs,
        verbose=0,
        validation_data=data(6),
        callbacks=[callback],
    )


def test_keras_own_scalars_equal_history(tmp_path):
    history = fit(kr.callbacks.TensorBoard(tmp_path)).history
    train, validation = written(tmp_path / "train"), written(tmp_path / "validation")
    for values, tag, name in (
        (train, "epoch_loss", "loss"),
        (validation, "epoch_loss", "val_loss"),
    ):
        assert [step for step, _ in values[tag]] == [0, 1]
        np.testing.assert_allclose([v for _, v in values[tag]], history[name], rtol=1e-6)


def test_speed_learning_rate_and_memory(tmp_path):
    fit(kr.callbacks.TensorBoard(tmp_path))
    values = written(tmp_path / "train")
    for tag in ("epoch_steps_per_second", "epoch_learning_rate", "epoch_host_memory"):
        assert [step for step, _ in values[tag]] == [0, 1]
    assert values["epoch_learning_rate"][0][1] == pytest.approx(0.1)
    assert values["epoch_host_memory"][0][1] > 1e7


def test_the_trainers_rows_and_plan(tmp_path):
    trainer = kr.ReplicatedTrainer(build, devices=2)
    trainer.compile(optimizer="sgd", loss="mse")
    fit(kr.callbacks.TensorBoard(tmp_path, one_replica=1.0), trainer=trainer)
    values = written(tmp_path / "train")
    assert b"mirrored" in values["plan"][0][1].item()
    assert b"dense" in values["model summary"][0][1].item()
    total, each = (
        values[f"epoch_rows_per_second{suffix}"][-1][1] for suffix in ("", "_per_replica")
    )
    assert total / each == pytest.approx(2, rel=1e-5)
    assert "epoch_scaling_efficiency" in values
    assert [step for step, _ in values["epoch_gradient_norm"]] == [0, 1]


def test_logs_of_a_run_are_not_changed(tmp_path):
    assert set(fit(kr.callbacks.TensorBoard(tmp_path)).history) == {"loss", "val_loss"}


def test_the_loss_scale_of_float16(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    callback = kr.callbacks.TensorBoard(tmp_path)
    fit(callback, epochs=1)
    scale = float(callback.model.optimizer.dynamic_scale.numpy())
    assert written(tmp_path / "train")["epoch_loss_scale"][0][1] == scale


def test_dashboards_hold_what_the_run_has(tmp_path):
    fit(kr.callbacks.TensorBoard(tmp_path), metrics=["mae"])
    text = written(tmp_path / "train")["custom_scalars__config__"][-1][1].item()
    layout = layout_pb2.Layout.FromString(text)
    charts = {category.title: [c.title for c in category.chart] for category in layout.category}
    assert charts["Training"] == ["loss", "mae"]
    assert charts["Scaling"] == ["steps per second"]
    assert charts["Health"] == ["learning rate", "memory of the host process (bytes)"]


def test_charts_of_several_optimizers_share_one_expression():
    found = dashboards.dashboards(["learning_rate_adam", "learning_rate_sgd", "loss", "val_loss"])
    assert found["Health"] == {"learning rate": "^epoch_learning_rate(_.*)?$"}
    assert found["Training"] == {"loss": "^epoch_loss$"}


def test_hparams(tmp_path):
    callback = kr.callbacks.TensorBoard(tmp_path, hparams={"learning_rate": 0.1, "name": "a"})
    fit(callback, epochs=1)
    reader = event_accumulator.EventAccumulator(str(tmp_path / "train"))
    reader.Reload()
    assert reader.PluginTagToContent("hparams")


def test_images_become_one_grid_each_epoch(tmp_path):
    epochs = []

    def samples(epoch):
        epochs.append(epoch)
        return np.full((5, 4, 4, 1), 0.5, "float32")

    fit(kr.callbacks.TensorBoard(tmp_path, images={"samples": samples}))
    assert epochs == [0, 1]
    width, height, _ = written(tmp_path / "train")["samples"][0][1]
    assert (int(width), int(height)) == (12, 8)


def test_grids_are_filled_row_by_row():
    images = np.arange(3).reshape(3, 1, 1, 1)
    np.testing.assert_array_equal(image_grid(images)[..., 0], [[0, 1], [2, 0]])
    np.testing.assert_array_equal(image_grid(images, columns=3)[..., 0], [[0, 1, 2]])


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3])
def test_step_scalars_come_every_update_freq_steps(tmp_path, steps_per_execution):
    callback = kr.callbacks.TensorBoard(tmp_path, update_freq=2)
    model = build()
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    model.fit(*data(24), batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    steps = [step for step, _ in written(tmp_path / "train")["batch_loss"]]
    # 6 steps an epoch; a call that ends past a multiple of 2 writes at its end.
    assert (
        steps
        == {1: [2, 4, 6, 8, 10, 12], 2: [2, 4, 6, 8, 10, 12], 3: [3, 6, 9, 12]}[steps_per_execution]
    )


@pytest.mark.parametrize(
    "arguments, interval",
    [({}, None), ({"update_freq": 8}, 8), ({"update_freq": "batch"}, 1), ({"profile_batch": 2}, 1)],
)
def test_how_often_it_asks_for_a_batch(tmp_path, arguments, interval):
    assert kr.callbacks.TensorBoard(tmp_path, **arguments).batch_interval == interval


def test_a_grid_needs_images():
    with pytest.raises(ValueError, match=r"`images` must have the shape .* Received: images of"):
        image_grid(np.zeros((0, 4, 4, 1)))
