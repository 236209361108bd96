"""kr.callbacks.Throughput: driven by Keras, by hand, and by the trainer."""

import keras
import numpy as np
import pytest

import keras_replicator as kr


class Clock:
    """A clock that moves by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def started(clock, params, **arguments):
    """A Throughput at the start of an epoch, with what a trainer would tell it."""
    throughput = kr.callbacks.Throughput(clock=clock, **arguments)
    throughput.set_params(params)
    throughput.set_model(model := keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.25), "mse")
    throughput.on_epoch_begin(0)
    return throughput


def test_speeds_are_rows_and_steps_per_second():
    clock = Clock()
    throughput = started(clock, {"steps": 5})
    throughput.params.update(rows_seen=80, num_replicas=4)
    clock.now = 2.0
    logs = {"loss": 1.0}
    throughput.on_epoch_end(0, logs)
    assert logs == {
        "loss": 1.0,
        "rows_per_second": 40.0,
        "rows_per_second_per_replica": 10.0,
        "steps_per_second": 2.5,
        "learning_rate": 0.25,
    }


def test_validation_is_not_training_time():
    clock = Clock()
    throughput = started(clock, {"steps": 1, "rows_seen": 80})
    clock.now = 2.0
    throughput.on_test_begin()
    clock.now = 10.0
    throughput.on_test_end()
    logs = {}
    throughput.on_epoch_end(0, logs)
    assert logs["rows_per_second"] == 40.0


def test_steps_that_were_seen_win_over_steps_that_were_planned():
    clock = Clock()
    throughput = started(clock, {"steps": 10, "steps_seen": 4})
    clock.now = 1.0
    logs = {}
    throughput.on_epoch_end(0, logs)
    assert logs["steps_per_second"] == 4.0


def test_scaling_efficiency_and_waiting_share():
    clock = Clock()
    params = {"rows_seen": 60, "num_replicas": 4, "input_wait_seconds": 0.5}
    throughput = started(clock, params, one_replica=10)
    clock.now = 2.0
    logs = {}
    throughput.on_epoch_end(0, logs)
    assert logs["scaling_efficiency"] == pytest.approx(0.75)
    assert logs["input_wait_share"] == pytest.approx(0.25)


def test_what_the_logs_hold_already_stays():
    throughput = started(Clock(), {"steps": 1})
    logs = {"learning_rate": 7.0}
    throughput.on_epoch_end(0, logs)
    assert logs["learning_rate"] == 7.0


def test_it_does_not_look_at_batches():
    base = keras.callbacks.Callback
    for hook in ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end"):
        assert getattr(kr.callbacks.Throughput, hook) is getattr(base, hook)


def test_history_of_keras_fit_gets_what_keras_tells():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    x = np.zeros((10, 2), "float32")
    history = model.fit(
        x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[kr.callbacks.Throughput()]
    )
    assert history.history["learning_rate"] == [0.5, 0.5]
    assert len(history.history["steps_per_second"]) == 2
    assert "rows_per_second" not in history.history


@pytest.mark.parametrize("replicas", [1, 2])
def test_history_of_the_trainer_has_rows(replicas):
    trainer = kr.ReplicatedTrainer(
        lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), devices=replicas
    )
    trainer.compile(optimizer="sgd", loss="mse")
    x = np.zeros((10, 2), "float32")
    history = trainer.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=(x, x[:, :1]),
        callbacks=[kr.callbacks.Throughput()],
    ).history
    total, each = history["rows_per_second"], history["rows_per_second_per_replica"]
    assert len(total) == 2 and min(total) > 0
    np.testing.assert_allclose(np.divide(total, each), replicas)


def test_speed_of_one_replica_must_be_positive():
    with pytest.raises(ValueError, match=r"`one_replica` must be .* Received: one_replica=0"):
        kr.callbacks.Throughput(one_replica=0)
