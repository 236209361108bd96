"""Counters, seeds and metric states of a step: what it begins with, and what it gives back."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_replicator import replica
from keras_replicator.steps.step_state import StepState, state_of_step


def run_on_worker(state, starts, step):
    """Runs a step with copies of its own; returns what it has added."""

    @tf.function(autograph=False)
    def run(starts):
        with state.in_step(starts):
            step()
            return state.added(starts)

    return run(tf.constant(starts, tf.int64)).numpy()


def test_a_step_gives_back_what_it_has_added():
    counter = keras.Variable(5, dtype="int64", trainable=False)
    mean = keras.metrics.Mean()
    mean.update_state([10.0, 20.0])
    state = StepState([(counter, 1)], [], mean.variables)
    state.open()

    def step():
        mean.update_state([1.0, 2.0, 3.0])
        counter.assign_add(1)

    added = run_on_worker(state, state.next_starts(), step)
    assert added.tolist() == [1.0, 6.0, 3.0]
    assert int(counter) == 5, "a step of another process changes nothing here"
    state.add(added)
    state.write()
    assert int(counter) == 6
    assert float(mean.result()) == pytest.approx(36 / 5)


def test_updates_under_a_condition_are_counted_when_they_happen():
    counter = keras.Variable(0, dtype="int64", trainable=False)
    state = StepState([(counter, 1)], [], [])
    state.open()

    def step():
        tf.cond(
            tf.equal(counter.value % 2, 0), lambda: counter.assign_add(1), lambda: counter.value
        )

    for _ in range(3):
        state.add(run_on_worker(state, state.next_starts(), step))
    state.write()
    assert int(counter) == 1


def test_steps_under_way_have_numbers_of_their_own():
    counter = keras.Variable(7, dtype="int64", trainable=False)
    generator = keras.random.SeedGenerator(3)
    state = StepState([(counter, 2)], [(generator.state, 3)], [])
    state.open()
    starts = [state.next_starts().tolist() for _ in range(3)]
    assert starts == [[7, 3, 0], [9, 3, 3], [11, 3, 6]]
    state.add(np.array([2.0]))
    assert state.next_starts().tolist() == [13, 3, 9]
    for _ in range(3):
        state.add(np.array([2.0]))
    state.write()
    assert int(counter) == 15
    assert generator.state.numpy().tolist() == [3, 12]


def test_the_order_of_ends_does_not_matter():
    total = keras.metrics.Sum()
    state = StepState([], [], total.variables)
    state.open()
    parts = [np.array([value]) for value in (1e8, 1.0, -1e8, 2.0)]
    for _ in parts:
        state.next_starts()
    for part in reversed(parts):
        state.add(part)
    state.write()
    assert float(total.result()) == 3.0


def test_a_step_is_known_from_its_building():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    metric = keras.metrics.Mean()
    optimizer = keras.optimizers.SGD()
    weight = keras.Variable([1.0])
    building = replica.Replica(building=True, asynchronous=True)
    with replica.activate(building):
        model(np.ones((1, 2)), training=True)
        metric.update_state(1.0)
        optimizer.apply([tf.constant([1.0])], [weight])
    state = state_of_step(building)
    assert [variable is optimizer.iterations for variable in state.counters] == [True]
    assert len(state.seeds) == 1
    assert {id(variable) for variable in state.metrics} == {id(v) for v in metric.variables}
    assert state_of_step(building, replayed=[metric]).metrics == []


def test_what_was_added_is_written_before_the_next_start():
    """Steps one after the other within a call: the numbers go on without a look at the variable."""
    counter = keras.Variable(0, dtype="int64", trainable=False)
    state = StepState([(counter, 1)], [], [])
    state.open()
    for number in range(3):
        assert state.next_starts().tolist() == [number]
        state.add(np.array([1.0]))
    state.write()
    state.open()
    assert int(counter) == 3
    assert state.next_starts().tolist() == [3]
