"""Cases of files: saved from N replicas, loaded anywhere, optimizer state included."""

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from tests.helpers import (
    NotesRows,
    assert_close,
    compiled_trainer,
    first_weight,
    network,
    ones,
    regression,
    sequential,
)

one_and_two = pytest.mark.parametrize("replicas", [1, 2])


def adam():
    return keras.optimizers.Adam(0.01)


def fit_in_order(subject, x, y, batch_size=4, epochs=1):
    subject.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)


def state(optimizer):
    """Every variable of an optimizer as an array, iterations and slots."""
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in optimizer.variables]


def assert_bit_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@one_and_two
def test_b51_weights_file_holds_the_optimizer(tmp_path, replicas):
    """tensorflow#44518: slots and iterations are bit-equal after loading, weights after a step."""
    x, y = regression(5)
    path = tmp_path / "model.weights.h5"
    unbroken = compiled_trainer(network, replicas, optimizer=adam())
    fit_in_order(unbroken, x, y)
    unbroken.model.save_weights(path)

    loaded = compiled_trainer(network, replicas, optimizer=adam())
    loaded.model.optimizer.build(loaded.model.trainable_variables)
    loaded.load_weights(path)
    assert int(loaded.model.optimizer.iterations) == 2
    assert_bit_equal(state(loaded.model.optimizer), state(unbroken.model.optimizer))
    for trainer in (unbroken, loaded):
        fit_in_order(trainer, x, y, batch_size=5)
    assert_bit_equal(loaded.model.get_weights(), unbroken.model.get_weights())


def test_b52_files_load_in_keras_and_in_a_trainer(tmp_path):
    """tensorflow#32561: .keras and .weights.h5 keep predictions, optimizer and the next step."""
    x, y = regression(8)
    trainer = compiled_trainer(network, optimizer=adam())
    fit_in_order(trainer, x, y, epochs=2)
    trainer.save(tmp_path / "model.keras")
    trainer.save_weights(tmp_path / "model.weights.h5")

    plain = keras.models.load_model(tmp_path / "model.keras")
    weights_only = network()
    weights_only.compile(optimizer=adam(), loss="mse")
    weights_only.optimizer.build(weights_only.trainable_variables)
    weights_only.load_weights(tmp_path / "model.weights.h5")
    again = keras.models.load_model(tmp_path / "model.keras")
    replicated = compiled_trainer(again, optimizer=again.optimizer)

    expected = trainer.predict(x, verbose=0)
    expected_state = state(trainer.model.optimizer)
    subjects = [trainer, plain, weights_only, replicated]
    models = [getattr(subject, "model", subject) for subject in subjects]
    for subject, model in zip(subjects[1:], models[1:], strict=True):
        assert_close(subject.predict(x, verbose=0), expected, what="predict")
        assert_close(state(model.optimizer), expected_state, what="optimizer")
    for subject in subjects:
        fit_in_order(subject, x, y, batch_size=8)
    for model in models[1:]:
        assert_close(model.get_weights(), models[0].get_weights(), what="weights")


@one_and_two
def test_b53_set_weights_reaches_every_replica(replicas):
    """tf-keras#731: weights set before any fit, and again after one, are those of all replicas."""
    x, y = regression(8)
    source = network()
    source.compile(loss="mse")
    weights = source.get_weights()
    expected = source.evaluate(x, y, batch_size=4, verbose=0)
    trainer = compiled_trainer(network, replicas)
    for _ in range(2):
        trainer.model.set_weights(weights)
        assert_bit_equal(trainer.model.get_weights(), weights)
        copies = trainer.run(lambda: [keras.ops.copy(w) for w in trainer.model.trainable_variables])
        for copy in copies:
            assert_bit_equal([np.asarray(weight) for weight in copy], weights)
        assert_close(trainer.evaluate(x, y, batch_size=4, verbose=0), expected, what="evaluate")
        fit_in_order(trainer, x, y)


@pytest.mark.parametrize("replicas", [1, 4])
def test_b54_loaded_model_is_split(tmp_path, replicas):
    """keras#16788: a loaded model trains on 8 rows as N calls of 8 / N rows: w = 0.2."""
    dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    sequential((1,), NotesRows(), dense).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    trainer = compiled_trainer(loaded, replicas)
    NotesRows.seen.clear()
    fit_in_order(trainer, ones(8), ones(8), batch_size=8)
    assert NotesRows.seen == [8 // replicas] * replicas
    assert first_weight(trainer.model) == pytest.approx(0.2, rel=1e-6)


@one_and_two
def test_c54_checkpoint_resumes_exactly(tmp_path, replicas):
    """C54: 2 epochs, checkpoint, a new trainer, 1 epoch: bit-equal to 3 epochs; iterations 9."""
    x, y = regression(12)
    initial = network().get_weights()

    def trainer(weights=None):
        made = compiled_trainer(network, replicas, optimizer=adam())
        if weights:
            made.model.set_weights(weights)
        return made

    unbroken = trainer(initial)
    fit_in_order(unbroken, x, y, epochs=3)
    first = trainer(initial)
    fit_in_order(first, x, y, epochs=2)
    first.save_checkpoint(tmp_path / "checkpoint")
    second = trainer()
    second.restore_checkpoint(tmp_path / "checkpoint")
    fit_in_order(second, x, y)
    assert_bit_equal(second.model.get_weights(), unbroken.model.get_weights())
    assert int(second.model.optimizer.iterations) == 9


def datasets(path):
    """{name: shape} of all data sets of an HDF5 file."""
    found = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item.shape

    with h5py.File(path) as file:
        file.visititems(note)
    return found


@pytest.mark.parametrize("replicas", [1, 4])
def test_c55_weights_file_does_not_depend_on_replicas(tmp_path, replicas):
    """C55: the same data sets with the same shapes as the file of one device."""

    def build():
        return sequential((3,), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1))

    x, y = regression(8)
    alone = build()
    alone.compile(optimizer=adam(), loss="mse")
    trainer = compiled_trainer(build, replicas, optimizer=adam())
    for subject, name in ((alone, "one"), (trainer, "many")):
        fit_in_order(subject, x, y)
        subject.save_weights(tmp_path / f"{name}.weights.h5")
    assert datasets(tmp_path / "many.weights.h5") == datasets(tmp_path / "one.weights.h5")
