"""Checkpoints: written whole or not at all, and resumed exactly."""

import os

import keras
import numpy as np
import pytest

import keras_replicator as kr
from keras_replicator import checkpoints
from tests.helpers import cpus, run_python

TENSORS = {"model/0": np.arange(6.0).reshape(2, 3), "seed/0": np.array([1, 2], "int32")}
STATE = {
    "epoch": 1,
    "step": 2,
    "total_steps": 6,
    "history": {"loss": [1.0]},
    "callbacks": [],
    "plan": "Plan",
    "model": None,
}


def write(directory, step=6, keep=None):
    return checkpoints.write(str(directory), step, TENSORS, STATE, keep)


def test_what_is_written_is_read(tmp_path):
    path, tensors, state = checkpoints.read(os.path.dirname(write(tmp_path)))
    assert os.path.basename(path) == "step-00000006"
    assert state == STATE
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], array)
        assert tensors[name].dtype == array.dtype


def test_keep_removes_the_oldest(tmp_path):
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert [os.path.basename(path) for path in checkpoints.complete(str(tmp_path))] == [
        "step-00000004",
        "step-00000003",
    ]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.index"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "one byte"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, capsys, name, damage):
    before = write(tmp_path, 1)
    file = os.path.join(write(tmp_path, 2), name)
    with open(file, "rb") as opened:
        content = opened.read()
    os.remove(file)
    kept = {
        "empty": b"",
        "half": content[: len(content) // 2],
        "one byte": bytes([content[0] ^ 1]) + content[1:],
    }
    if damage != "missing":
        with open(file, "wb") as opened:
            opened.write(kept[damage])
    path, _, _ = checkpoints.read(str(tmp_path))
    assert path == before
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("function", ["_write_tensors", "_write_json", "_checksum", "_sync_folder"])
def test_a_failure_while_writing_loses_nothing(tmp_path, monkeypatch, function):
    before = write(tmp_path, 1)

    def full(*args):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, function, full)
        with pytest.raises(checkpoints.CheckpointError, match="earlier checkpoints are unchanged"):
            write(tmp_path, 2)
    assert checkpoints.damage(before) is None
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".writing")]


def test_no_checkpoint_is_named(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="No complete checkpoint"):
        checkpoints.read(str(tmp_path))


# ------------------------------------------------------------------------------ exact resume


def data():
    generator = np.random.default_rng(0)
    return (
        generator.normal(size=(23, 4)).astype("float32"),
        generator.normal(size=(23, 1)).astype("float32"),
    )


def build(*middle):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), *middle, keras.layers.Dense(1)]
    )


def with_dropout():
    return build(keras.layers.Dropout(0.2), keras.layers.BatchNormalization())


class Interrupt(keras.callbacks.Callback):
    """Asks for a checkpoint after a number of steps, and ends the run one step later."""

    def __init__(self, trainer, directory, step):
        super().__init__()
        self.trainer, self.directory, self.step, self.steps = trainer, directory, step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            self.trainer.save_checkpoint(self.directory)
        if self.steps == self.step + 1:
            raise KeyboardInterrupt


def train(build, replicas, directory=None, interrupted_at=None, **options):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas), seed=3)
    trainer.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    patience = keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True)
    callbacks = [patience]
    if interrupted_at is not None:
        callbacks.append(Interrupt(trainer, directory, interrupted_at))
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(*data(), batch_size=6, epochs=4, verbose=0, callbacks=callbacks)
        return None
    history = trainer.fit(
        *data(), batch_size=6, epochs=4, verbose=0, callbacks=callbacks, resume=directory
    ).history
    return history, trainer.model.get_weights(), int(trainer.optimizers["optimizer"].iterations)


@pytest.mark.parametrize(
    "replicas, options", [(1, {}), (2, {"gradient_accumulation_steps": 3}), (4, {})]
)
def test_resume_in_mid_epoch_is_exact(tmp_path, replicas, options):
    """Shuffling, dropout, Adam, EarlyStopping, a partial last batch: bit for bit."""
    unbroken = train(with_dropout, replicas, **options)
    train(with_dropout, replicas, tmp_path, interrupted_at=6, **options)
    resumed = train(with_dropout, replicas, tmp_path, **options)
    assert resumed[0] == unbroken[0]
    assert resumed[2] == unbroken[2]
    for actual, expected in zip(resumed[1], unbroken[1]):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("before, after", [(4, 1), (1, 3)])
def test_resume_on_another_number_of_replicas(tmp_path, capsys, before, after):
    unbroken = train(build, 1)
    train(build, before, tmp_path, interrupted_at=6)
    resumed = train(build, after, tmp_path)
    for name, values in unbroken[0].items():
        np.testing.assert_allclose(resumed[0][name], values, rtol=1e-5)
    for actual, expected in zip(resumed[1], unbroken[1]):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert f"written on {before} replica(s) and goes on with {after}" in capsys.readouterr().err


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    train(build, 1, tmp_path, interrupted_at=2)
    trainer = kr.ReplicatedTrainer(
        lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=cpus(1)
    )
    trainer.compile("adam", "mse")
    before = trainer.model.get_weights()
    with pytest.raises(checkpoints.CheckpointError, match="Nothing was restored"):
        trainer.fit(*data(), verbose=0, resume=tmp_path)
    for actual, expected in zip(trainer.model.get_weights(), before):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("every", ["", "5", "0 steps", "2.5 epochs", "3 fortnights"])
def test_every_names_what_it_takes(tmp_path, every):
    with pytest.raises(ValueError, match="Checkpoint: `every` must be a number with a unit"):
        kr.callbacks.Checkpoint(tmp_path, every=every)


def test_checkpoint_by_steps_and_epochs(tmp_path):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    trainer.compile("sgd", "mse")
    trainer.fit(
        *data(),
        batch_size=6,
        epochs=3,
        verbose=0,
        callbacks=[
            kr.callbacks.Checkpoint(tmp_path / "steps", every="5 steps", keep=None),
            kr.callbacks.Checkpoint(tmp_path / "epochs", every="2 epochs", keep=None),
        ],
    )
    assert sorted(os.listdir(tmp_path / "steps")) == ["step-00000005", "step-00000010"]
    assert sorted(os.listdir(tmp_path / "epochs")) == ["step-00000008"]


PREEMPTED = """
import os, signal, sys
import keras, numpy as np
import keras_replicator as kr

class Stop(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 9:
            os.kill(os.getpid(), signal.SIGTERM)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
trainer = kr.ReplicatedTrainer(model, seed=1)
trainer.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
callbacks = [kr.callbacks.Checkpoint(sys.argv[1], every="100 steps")]
if not os.path.exists(sys.argv[1]):
    callbacks.append(Stop())
trainer.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, resume="auto", callbacks=callbacks)
print("iterations", int(model.optimizer.iterations))
"""


@pytest.mark.multiprocess
def test_sigterm_saves_and_ends_with_75(tmp_path):
    """SIGTERM in mid-epoch: code 75 and a checkpoint; the next start goes on to the end."""
    folder = tmp_path / "checkpoints"
    first = run_python("-c", PREEMPTED, str(folder))
    assert first.returncode == 75, first.stdout
    assert os.listdir(folder) == ["step-00000009"]
    second = run_python("-c", PREEMPTED, str(folder))
    assert second.returncode == 0, second.stdout
    assert "iterations 24" in second.stdout
