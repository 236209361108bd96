"""Which files the workers of a job write: the folders of Keras' callbacks."""

import keras
import pytest

from keras_replicator.plan import Plan
from keras_replicator.shared_files import worker_files
from tests.helpers import sequential


def plan_of(worker):
    return Plan("multi_worker", ("CPU:0",), num_replicas=2, num_workers=2, worker=worker)


def checkpoint_of(model, path):
    checkpoint = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
    checkpoint.set_model(model)
    return checkpoint


@pytest.fixture
def model():
    return sequential((2,), keras.layers.Dense(1))


@pytest.mark.parametrize("name", ["best.keras", "files/best.keras", "files/{epoch}/best.keras"])
def test_other_workers_make_no_folder_of_a_checkpoint(model, tmp_path, name):
    """A worker that makes the chief's folder between its look and its own try stops the chief."""
    path = str(tmp_path / "run" / name)
    checkpoint = checkpoint_of(model, path)
    with worker_files([checkpoint], model, plan_of(worker=1)):
        checkpoint.on_epoch_end(0, {"loss": 2.0})
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.best == 2.0  # it decides as the chief's does
    assert checkpoint.filepath == path


def test_the_chief_has_the_folder_before_another_worker_can_make_it(model, tmp_path):
    """The folder is there when Keras looks, whatever else is written beside the checkpoint."""
    folder = tmp_path / "run"
    checkpoint = checkpoint_of(model, str(folder / "{epoch}" / "best.keras"))
    with worker_files([checkpoint], model, plan_of(worker=0)):
        assert list(tmp_path.rglob("*")) == [folder]
        checkpoint.on_epoch_end(0, {"loss": 2.0})
    assert (folder / "1" / "best.keras").is_file()


def test_a_checkpoint_in_the_current_folder(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = checkpoint_of(model, "best.keras")
    with worker_files([checkpoint], model, plan_of(worker=0)):
        checkpoint.on_epoch_end(0, {"loss": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["best.keras"]
