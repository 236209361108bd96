"""Cases of random numbers: different on every replica, repeatable as a run (contract, point 5)."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers

import keras_replicator as kr
from tests.helpers import NotesValues, compiled_trainer, cpus, ones, regression, sequential, toy


@pytest.mark.parametrize("replicas", [1, 2])
def test_b23_dropout_trains(replicas):
    """keras#20611: Dense - Dropout - Dense - Dense trains, with finite losses."""

    def build():
        return sequential(
            (3,), layers.Dense(128), layers.Dropout(0.2), layers.Dense(128), layers.Dense(1)
        )

    trainer = compiled_trainer(build, replicas, optimizer=keras.optimizers.Adam())
    history = trainer.fit(*regression(16), batch_size=8, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()


def assert_rows_agree_by_chance(rows):
    """Any two of the 4 rows have the same mask on half of their 1000 positions."""
    assert rows.shape == (4, 1000)
    for one, other in itertools.combinations(rows != 0, 2):
        assert np.mean(one == other) == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("replicas", [1, 2])
def test_b24_masks_of_one_step_differ(replicas):
    """tensorflow#58433: Dropout(0.5) draws another mask for every row, of one replica or of two."""
    notes = NotesValues()

    def build():
        return sequential((1000,), layers.Dropout(0.5, seed=7), notes, layers.Dense(1))

    trainer = compiled_trainer(build, replicas)
    x = np.ones((4, 1000), "float32")
    trainer.fit(x, ones(4), batch_size=4, verbose=0)
    assert_rows_agree_by_chance(np.concatenate(notes.seen))


def test_masks_of_two_replicas():
    """Issue 2: masks of two replicas agree on 50 +- 3 % of 10,000 positions."""
    trainer = kr.ReplicatedTrainer(
        lambda: sequential((10000,), layers.Dropout(0.5)), devices=cpus(2)
    )
    x = np.ones((2, 10000), "float32")
    one, other = trainer.run(lambda rows: trainer.model(rows, training=True), x)
    assert np.mean((np.asarray(one) != 0) == (np.asarray(other) != 0)) == pytest.approx(
        0.5, abs=0.03
    )


def test_b24_masks_of_run_differ():
    """tensorflow#58433: the same for a model that is called inside trainer.run."""
    trainer = kr.ReplicatedTrainer(
        lambda: sequential((1000,), layers.Dropout(0.5, seed=7)), devices=cpus(2)
    )
    x = np.ones((4, 1000), "float32")
    outputs = trainer.run(lambda rows: trainer.model(rows, training=True), x)
    assert_rows_agree_by_chance(np.concatenate([np.asarray(output) for output in outputs]))


@pytest.mark.parametrize("replicas", [2, 4])
def test_b24b_seeded_run_repeats(replicas):
    """keras#18426: two trainers with seed=3 in one process: weights and losses are bit-equal."""

    def build():
        return sequential(
            (3,),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(4),
            layers.GaussianNoise(0.1),
            layers.Dense(1),
        )

    def run():
        trainer = kr.ReplicatedTrainer(build, devices=cpus(replicas), seed=3)
        trainer.compile(optimizer="adam", loss="mse")
        fit = {"batch_size": 6, "epochs": 3, "shuffle": True, "verbose": 0}
        history = trainer.fit(*regression(20), **fit).history
        return history["loss"], [weight.tolist() for weight in trainer.model.get_weights()]

    assert run() == run()


def test_c35_seed_generator_in_run():
    """C35: on 3 replicas and in two calls a SeedGenerator of the model gives different numbers."""

    def build():
        model = toy()
        model.generator = keras.random.SeedGenerator(5)
        return model

    trainer = kr.ReplicatedTrainer(build, devices=cpus(3))

    def draw():
        return keras.random.normal((4,), seed=trainer.model.generator)

    drawn = [np.asarray(output).tolist() for _ in range(2) for output in trainer.run(draw)]
    assert len(drawn) == 6
    assert all(one != other for one, other in itertools.combinations(drawn, 2))


def test_c36_equal_initial_weights():
    """C36: without any seed the 4 replicas start from equal copies."""
    trainer = kr.ReplicatedTrainer(lambda: sequential((3,), layers.Dense(5)), devices=cpus(4))
    kernels = trainer.run(lambda: keras.ops.copy(trainer.model.trainable_variables[0]))
    assert len(kernels) == 4
    for kernel in kernels[1:]:
        np.testing.assert_array_equal(np.asarray(kernel), np.asarray(kernels[0]))
    assert np.asarray(kernels[0]).any()
