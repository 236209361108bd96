"""Callbacks of Keras that count batches act at the batches of plain Keras.

With `steps_per_execution="auto"` one call of the loop runs many steps, and a callback hears of the
last one of each call only. Those that count must not miss one.
"""

import keras
import pytest

from tests.helpers import compiled_trainer, ones, toy
from tests.tensorboard import scalars


class Checkpoint(keras.callbacks.ModelCheckpoint):
    """Notes after how many updates it would have saved."""

    def __init__(self, folder, **options):
        super().__init__(str(folder / "a.keras"), **options)
        self.saved = []

    def _save_model(self, epoch, batch, logs):
        self.saved.append(int(self.model.optimizer.iterations))


class Backup(keras.callbacks.BackupAndRestore):
    """Notes after how many updates it would have saved."""

    def __init__(self, folder, **options):
        super().__init__(str(folder / "backup"), **options)
        self.saved = []

    def _save_model(self):
        self.saved.append(int(self.model.optimizer.iterations))


def fit(subject, callback):
    """3 epochs of 20 batches."""
    subject.fit(ones(80), ones(80), batch_size=4, epochs=3, verbose=0, callbacks=[callback])


def keras_model():
    model = toy()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("save_freq", [7, 8, 30, "epoch"])
@pytest.mark.parametrize("kind", [Checkpoint, Backup])
def test_saves(tmp_path, kind, save_freq):
    """ModelCheckpoint and BackupAndRestore save after the same updates."""
    expected, callback = (kind(tmp_path, save_freq=save_freq) for _ in range(2))
    fit(keras_model(), expected)
    fit(compiled_trainer(toy, replicas=1), callback)
    assert callback.saved == expected.saved


@pytest.mark.parametrize("update_freq", ["batch", 8])
def test_tensorboard_summaries(tmp_path, update_freq):
    """TensorBoard writes the losses of the same batches."""
    written = []
    for name, subject in (("keras", keras_model()), ("ours", compiled_trainer(toy, replicas=1))):
        folder = tmp_path / name
        fit(subject, keras.callbacks.TensorBoard(str(folder), update_freq=update_freq))
        written.append(scalars(folder / "train")["batch_loss"])
    expected, ours = written
    assert [step for step, _ in ours] == [step for step, _ in expected]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in expected], rel=1e-5)
