"""Cases of Keras' own callbacks, used unchanged."""

import csv
import json

import keras
import numpy as np
import pytest
from keras import callbacks, layers

import keras_replicator as kr
from tests.helpers import (
    assert_close,
    column,
    compiled_trainer,
    cpus,
    first_weight,
    normal,
    ones,
    sequential,
    toy,
)
from tests.tensorboard import scalars


class Stop(Exception):
    """What the callbacks of these tests raise."""


class Raises(callbacks.Callback):
    """Raises at the start of one epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Stop


class Notes(callbacks.Callback):
    """Notes every hook that is called, with its number."""

    def __init__(self):
        super().__init__()
        self.calls = []


def note(hook):
    def method(self, *arguments, logs=None):
        numbers = [int(value) for value in arguments if isinstance(value, (int, np.integer))]
        self.calls.append((hook, *numbers))

    return method


for phase in ("train", "test", "predict"):
    for hook in (f"on_{phase}_begin", f"on_{phase}_end"):
        setattr(Notes, hook, note(hook))
    for hook in (f"on_{phase}_batch_begin", f"on_{phase}_batch_end"):
        setattr(Notes, hook, note(hook))
for hook in ("on_epoch_begin", "on_epoch_end"):
    setattr(Notes, hook, note(hook))


def fit_both(x, y, make_callbacks, learning_rate=0.1, **fit):
    """The same fit of `toy` by plain Keras and by a trainer: two of (model, history, callbacks)."""
    results = []
    for subject in (toy(), compiled_trainer(toy, learning_rate=learning_rate)):
        if isinstance(subject, keras.Model):
            subject.compile(optimizer=keras.optimizers.SGD(learning_rate), loss="mse")
        made = make_callbacks()
        history = subject.fit(x, y, callbacks=made, shuffle=False, verbose=0, **fit).history
        results.append((getattr(subject, "model", subject), history, made))
    return results


def ten_outputs(with_input):
    """Dense(10) with the same initial weights in every build."""
    dense = layers.Dense(10, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    return sequential((20,), dense) if with_input else keras.Sequential([dense])


@pytest.mark.parametrize("with_input", [True, False], ids=["b55", "b55b"])
def test_b55_backup_and_restore(tmp_path, with_input):
    """tensorflow#84027: the second fit runs the 6 missing epochs and ends as an unbroken run.

    B55b: also with a Sequential without Input, which plain Keras refuses on one device.
    """
    x, y = normal(5, 20), normal(5, 10, seed=1)

    def fit(subject, *more):
        subject.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        backup = callbacks.BackupAndRestore(str(tmp_path / "backup"))
        return subject.fit(
            x, y, batch_size=4, epochs=10, shuffle=False, verbose=0, callbacks=[backup, *more]
        )

    def trainer():
        return kr.ReplicatedTrainer(lambda: ten_outputs(with_input), devices=cpus(2))

    with pytest.raises(Stop):
        fit(trainer(), Raises(4))
    second = trainer()
    history = fit(second)
    assert history.epoch == [4, 5, 6, 7, 8, 9]
    unbroken = ten_outputs(with_input=True)
    fit(unbroken)
    assert_close(second.model.get_weights(), unbroken.get_weights(), what="weights")


@pytest.mark.skipif(
    keras.__version__.startswith(("3.12.", "3.13.")),
    reason="ModelCheckpoint misses the first batch there, in keras.Model.fit, too",
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_b72_save_freq_with_steps_per_execution(tmp_path, replicas):
    """keras#17589: 32 batches, 4 per execution, save_freq=8: 4 files; batches 3, 7, ... 31."""
    trainer = compiled_trainer(toy, replicas, steps_per_execution=4)
    notes = Notes()
    saves = callbacks.ModelCheckpoint(str(tmp_path / "{batch:02d}.keras"), save_freq=8)
    trainer.fit(ones(64), ones(64), batch_size=2, verbose=0, callbacks=[saves, notes])
    assert len(list(tmp_path.iterdir())) == 4
    ends = [number for hook, *number in notes.calls if hook == "on_train_batch_end"]
    assert ends == [[number] for number in range(3, 32, 4)]
    assert int(trainer.model.optimizer.iterations) == 32


def test_k01_early_stopping_restores_best_weights():
    """K01: the validation loss is best after epoch 3: stops after epoch 5 with those weights."""
    x = np.full((14, 1), 0.3, "float32")
    unseen = np.full((7, 1), 0.3, "float32")
    (alone, expected, _), (model, history, _) = fit_both(
        x,
        ones(14),
        lambda: [callbacks.EarlyStopping(patience=2, restore_best_weights=True)],
        learning_rate=0.2,
        batch_size=4,
        epochs=8,
        validation_data=(unseen, np.full((7, 1), 0.3 * 1.2, "float32")),
    )
    assert len(history["loss"]) == 5
    # One update: 0.3 w approaches 1 by the factor 1 - 2 * 0.2 * 0.3^2; 4 updates an epoch.
    assert first_weight(model) == pytest.approx((1 - 0.964**12) / 0.3, rel=1e-5)
    assert_close(history, expected, what="history")
    assert_close(model.get_weights(), alone.get_weights(), what="weights")


def test_k02_reduce_on_plateau():
    """K02: the loss cannot fall: learning rates 0.1, 0.1, 0.05, 0.025, 0.0125."""
    (_, expected, _), (_, history, _) = fit_both(
        np.zeros((4, 1), "float32"),
        ones(4),
        lambda: [callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1)],
        batch_size=4,
        epochs=5,
    )
    assert_close(history["learning_rate"], [0.1, 0.1, 0.05, 0.025, 0.0125])
    assert_close(history, expected, what="history")


def test_k03_learning_rate_scheduler():
    """K03: rate 0.1 / (epoch + 1), 3 epochs of 2 updates."""
    (_, expected, _), (model, history, _) = fit_both(
        ones(6),
        ones(6),
        lambda: [callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
        batch_size=4,
        epochs=3,
    )
    left = (1 - 0.2) ** 2 * (1 - 0.2 / 2) ** 2 * (1 - 0.2 / 3) ** 2
    assert first_weight(model) == pytest.approx(1 - left, rel=1e-5)
    assert_close(history, expected, what="history")


def test_k04_model_checkpoint(tmp_path):
    """K04: one file per epoch and a best one, which predict as the model of their epoch."""
    trainer = compiled_trainer(toy)
    each = callbacks.ModelCheckpoint(str(tmp_path / "epoch-{epoch}.keras"))
    best = callbacks.ModelCheckpoint(
        str(tmp_path / "best.keras"), monitor="loss", save_best_only=True
    )
    trainer.fit(
        ones(12), ones(12), batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[each, best]
    )
    # The loss falls in every epoch of three updates: the best one is the last.
    right = {f"epoch-{epoch}.keras": 1 - 0.8 ** (3 * epoch) for epoch in (1, 2, 3)}
    right["best.keras"] = 1 - 0.8**9
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(right)
    for name, value in right.items():
        loaded = keras.models.load_model(tmp_path / name)
        assert loaded.predict(ones(1), verbose=0) == pytest.approx(value, rel=1e-5)


def test_k05_tensorboard(tmp_path):
    """K05: epoch_loss once an epoch in train and validation, with the values of history."""
    trainer = compiled_trainer(toy)
    history = trainer.fit(
        ones(8),
        ones(8),
        batch_size=4,
        epochs=2,
        validation_data=(ones(4), 2 * ones(4)),
        verbose=0,
        callbacks=[callbacks.TensorBoard(str(tmp_path))],
    ).history
    for folder, name in (("train", "loss"), ("validation", "val_loss")):
        steps, values = zip(*scalars(tmp_path / folder)["epoch_loss"], strict=True)
        assert steps == (0, 1)
        assert_close(list(values), history[name], what=folder)


def test_k06_csv_logger(tmp_path):
    """K06: three lines, equal to history."""
    trainer = compiled_trainer(toy, metrics=["mae"])
    history = trainer.fit(
        ones(10),
        column(*range(10)),
        batch_size=4,
        epochs=3,
        verbose=0,
        callbacks=[callbacks.CSVLogger(str(tmp_path / "log.csv"))],
    ).history
    lines = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [int(line["epoch"]) for line in lines] == [0, 1, 2]
    for name, values in history.items():
        assert_close([float(line[name]) for line in lines], values, what=name)


def test_k08_same_hooks_as_one_device():
    """K08: every hook is called in the order and with the batch numbers of one device."""
    (_, _, (expected,)), (_, _, (notes,)) = fit_both(
        ones(6),
        ones(6),
        lambda: [Notes()],
        batch_size=4,
        epochs=2,
        validation_data=(ones(4), ones(4)),
    )
    assert notes.calls == expected.calls
    assert ("on_train_batch_end", 1) in notes.calls


class StopsAtBatch(callbacks.Callback):
    """Asks to stop at the end of one batch, and counts batches."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        if batch == self.batch:
            self.model.stop_training = True


def test_k09_stop_training_in_an_epoch():
    """K09: stop_training at batch 2 of 5: three batches, one epoch, w = 1 - 0.8^3."""
    (alone, expected, _), (model, history, (stops,)) = fit_both(
        ones(20), ones(20), lambda: [StopsAtBatch(2)], batch_size=4, epochs=3
    )
    assert stops.batches == 3
    assert len(history["loss"]) == 1
    assert first_weight(model) == pytest.approx(0.488, rel=1e-5)
    assert_close(model.get_weights(), alone.get_weights(), what="weights")
    assert_close(history, expected, what="history")


class StopsIn(callbacks.Callback):
    """Sets the stop flag in the second call of one hook."""

    def __init__(self, hook):
        super().__init__()
        self.calls = 0
        setattr(self, hook, self.count)

    def count(self, *arguments, logs=None):
        self.calls += 1
        if self.calls == 2:
            self.model.stop_training = True


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end"])
def test_stop_training_between_batches(hook):
    """An epoch that has begun makes one step, as in Keras."""
    (alone, expected, (_, before)), (model, history, (_, after)) = fit_both(
        ones(8), ones(8), lambda: [StopsIn(hook), Notes()], batch_size=2, epochs=4
    )
    assert after.calls == before.calls
    assert_close(history, expected, what="history")
    assert_close(model.get_weights(), alone.get_weights(), what="weights")


def test_parameters_of_the_history():
    """What fit returns holds Keras' parameters and nothing else: it can be written as JSON."""
    history = compiled_trainer(toy).fit(ones(8), ones(8), batch_size=2, epochs=2, verbose=0)
    assert json.loads(json.dumps(history.params)) == {"verbose": 0, "epochs": 2, "steps": 4}


class Interrupts(callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("replicas", [1, 2])
def test_k12_interrupted_model_keeps_its_weights(replicas):
    """K12: Ctrl-C at the end of the third step leaves w = 1 - 0.8^3 in the user's own model."""
    model = toy()
    trainer = compiled_trainer(model, replicas, steps_per_execution=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            ones(12),
            ones(12),
            batch_size=2,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[Interrupts()],
        )
    assert first_weight(model) == pytest.approx(0.488, rel=1e-5)
