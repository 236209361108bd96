"""fast_dev_run, overfit_batches and kr.find_batch_size: what they promise."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from keras_replicator import memory
from keras_replicator.batch_size import _search
from tests.helpers import NotesValues, compiled_trainer, cpus, network, regression, sequential

X, Y = regression(20)


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps, self.tests, self.epochs = [], 0, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.tests += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_dev_run_makes_one_step_of_everything(kind, tmp_path, capsys):
    trainer, counts = compiled_trainer(network), Counts()
    data = {"x": X, "y": Y, "batch_size": 4}
    if kind == "tf.data":
        data = {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)}
    writers = [
        kr.callbacks.Checkpoint(tmp_path / "checkpoints"),
        keras.callbacks.ModelCheckpoint(str(tmp_path / "best.keras")),
        kr.callbacks.TensorBoard(tmp_path / "logs"),
    ]
    history = trainer.fit(
        **data,
        epochs=5,
        validation_data=(X, Y),
        validation_freq=3,
        resume="auto",
        callbacks=[counts, *writers],
        fast_dev_run=True,
    ).history
    assert (counts.steps, counts.tests, counts.epochs) == ([0], 1, 1)
    assert set(history) == {"loss", "val_loss"} and len(history["loss"]) == 1
    assert int(trainer.model.optimizer.iterations) == 1
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().err
    assert "without what writes files (Checkpoint, ModelCheckpoint, TensorBoard)" in said


def one_by_one():
    for begin in range(0, 20, 4):
        yield X[begin : begin + 4], Y[begin : begin + 4]


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4},
    "shuffled tf.data": lambda: {
        "x": tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(20, seed=1).batch(4)
    },
    "endless tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).repeat()},
    "generator": lambda: {"x": one_by_one()},
}


@pytest.mark.parametrize("kind", DATA)
def test_overfit_batches_are_the_same_in_every_epoch(kind):
    notes = NotesValues()
    trainer = kr.ReplicatedTrainer(
        lambda: sequential((3,), notes, keras.layers.Dense(1)), devices=cpus(1)
    )
    trainer.compile("sgd", "mse", steps_per_execution=1)
    trainer.fit(**DATA[kind](), epochs=3, overfit_batches=2, verbose=0)
    epochs = np.concatenate(notes.seen).reshape(3, 8, 3)
    assert len(np.unique(epochs[0], axis=0)) == 8
    np.testing.assert_array_equal(epochs[1], epochs[0])
    np.testing.assert_array_equal(epochs[2], epochs[0])
    if kind in ("arrays", "generator"):
        np.testing.assert_array_equal(epochs[0], X[:8])


def test_overfit_batches_come_again_within_a_longer_epoch():
    trainer, counts = compiled_trainer(network), Counts()
    trainer.fit(
        X, Y, batch_size=4, steps_per_epoch=5, overfit_batches=2, callbacks=[counts], verbose=0
    )
    assert counts.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_overfit_batches_is_a_count(value):
    with pytest.raises(ValueError, match=f"`overfit_batches` .* Received: overfit_batches={value}"):
        compiled_trainer(network).fit(X, Y, overfit_batches=value)


def state_of(trainer):
    model = trainer.model
    return [np.array(v) for v in (*model.get_weights(), *model.optimizer.variables)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_search_leaves_no_trace(replicas, capsys):
    def build():
        return sequential((3,), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1))

    def trained(search):
        keras.utils.set_random_seed(0)
        trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas), seed=5)
        trainer.compile("adam", "mse", metrics=["mae"], gradient_accumulation_steps=2)
        if search:
            assert kr.find_batch_size(trainer, X, Y, maximum=37) == 37
        history = trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
        return state_of(trainer), history

    (plain, plain_history), (searched, history) = trained(False), trained(True)
    for expected, actual in zip(plain, searched, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert history == plain_history
    assert f"{replicas} rows fit" in capsys.readouterr().out


def test_a_limit_of_memory_is_kept():
    def build():
        return sequential((256,), keras.layers.Dense(4096, "tanh"), keras.layers.Dense(1))

    trainer = compiled_trainer(build)
    x, y = np.ones((64, 256), "float32"), np.ones((64, 1), "float32")
    kr.find_batch_size(trainer, x, y, maximum=64, verbose=0)  # warm: code and arenas count, too
    memory.reset_peak(trainer.plan.devices)
    limit = memory.peak(trainer.plan.devices) + 400_000_000
    found = kr.find_batch_size(trainer, x, y, maximum=2**17, memory_limit=limit, verbose=0)
    # A row takes at least the hidden layer twice: 33 kB; and the search goes near to the limit.
    assert 1_000 <= found <= 400_000_000 / 33_000
    assert found % 2 == 0


def test_allocations_that_fail_are_caught(monkeypatch):
    trainer = compiled_trainer(network)
    phase = trainer.session.phases.get("train", trainer.sample_rows(X, Y)[1])
    original = phase.loop.one

    def one(element, position):
        if int(element[0]) > 13:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
        return original(element, position)

    monkeypatch.setattr(phase.loop, "one", one)
    assert kr.find_batch_size(trainer, X, Y, verbose=0) == 12
    with pytest.raises(ValueError, match=r"Not even 14 row\(s\) fit .* Received: start=14"):
        kr.find_batch_size(trainer, X, Y, start=14, verbose=0)


@pytest.mark.parametrize("largest, replicas", [(1, 1), (7, 1), (100, 4), (1000, 3), (4096, 8)])
def test_the_search_finds_the_largest_to_a_sixteenth(largest, replicas):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= largest

    found = _search(fits, lambda: None, 1, 4096, replicas)
    assert largest - max(largest / 16, replicas) <= found <= largest
    assert len(tried) == len(set(tried)) <= 20


def test_the_search_does_not_try_what_is_predicted_to_fail():
    tried = []

    def fits(size):
        tried.append(size)
        return True

    assert _search(fits, lambda: 50, 1, 4096, 1) == 50
    assert max(tried) == 50


def test_the_search_needs_a_compiled_trainer():
    with pytest.raises(ValueError, match="compile"):
        kr.find_batch_size(kr.ReplicatedTrainer(network, devices=cpus(1)), X, Y)


@pytest.mark.parametrize("name", ["start", "maximum", "memory_limit"])
def test_numbers_of_the_search_are_positive(name):
    with pytest.raises(ValueError, match=f"`{name}` must be an int of at least 1"):
        kr.find_batch_size(compiled_trainer(network), X, Y, **{name: 0})
