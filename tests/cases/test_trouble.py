"""Cases of errors that name cause, argument, what was received and the fix (contract, point 10)."""

import dataclasses

import keras
import pytest
import tensorflow as tf

import keras_replicator as kr
from tests.helpers import (
    column,
    cpus,
    first_weight,
    ones,
    run_python,
    run_script,
    sequential,
    toy,
)

STRATEGIES = (
    "auto",
    "one_device",
    "mirrored",
    "multi_worker",
    "parameter_server",
    "tpu",
    "mesh",
)


def assert_script_fails(source, *words):
    """The script ends with an error whose text has every one of `words`."""
    finished = run_script(source)
    assert finished.returncode != 0
    message = finished.stdout[finished.stdout.rindex("Error") :]
    for word in words:
        assert word in message, finished.stdout


def test_t01_device_that_does_not_exist():
    """T01: CPU:7 of two CPUs."""
    assert_script_fails(
        "import keras_replicator as kr\n"
        "from tests.helpers import toy\n"
        "kr.simulate_devices(2)\n"
        "kr.ReplicatedTrainer(toy, devices=['CPU:0', 'CPU:7'])\n",
        "devices",
        "CPU:7",
    )


def test_t03_unknown_strategy():
    """T03: a misspelt strategy; the error lists the names that are allowed."""
    with pytest.raises(ValueError, match="strategy") as raised:
        kr.ReplicatedTrainer(toy, strategy="mirorred", devices=cpus(2))
    for word in ("mirorred", *STRATEGIES):
        assert word in str(raised.value)


def test_t04_simulate_devices_too_late():
    """T04: TensorFlow has started already."""
    assert_script_fails(
        "import tensorflow as tf\n"
        "import keras_replicator as kr\n"
        "tf.add(1, 1)\n"
        "kr.simulate_devices(4)\n",
        "simulate_devices",
    )


def test_t05_plan_is_frozen_and_readable():
    """T05: the plan cannot be changed and its text names both devices."""
    plan = kr.ReplicatedTrainer(toy, devices=cpus(2)).plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, dataclasses.fields(plan)[0].name, None)
    assert "CPU:0" in str(plan)
    assert "CPU:1" in str(plan)


@pytest.mark.parametrize(
    "options, replicas",
    [
        (lambda: {"devices": 2}, 2),
        (lambda: {"strategy": "one_device"}, 1),
        (lambda: {"strategy": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])}, 2),
    ],
    ids=["count", "one_device", "own_strategy"],
)
def test_t06_ways_to_ask_for_devices(options, replicas):
    """T06: a count, a name and a strategy of the user: w = 0.2 each."""
    trainer = kr.ReplicatedTrainer(toy, **options())
    trainer.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    trainer.fit(ones(4), ones(4), batch_size=4, verbose=0)
    assert trainer.num_replicas == replicas
    assert first_weight(trainer.model) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize("command", ["plan", "env"])
def test_t07_command_line(command):
    """T07: both commands end with code 0 and say something."""
    finished = run_python("-m", "keras_replicator", command)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.strip()


def test_t08_fit_before_compile():
    """T08: the error says compile."""
    trainer = kr.ReplicatedTrainer(toy, devices=cpus(2))
    with pytest.raises(Exception, match="compile"):
        trainer.fit(ones(4), ones(4), verbose=0)


class AveragesOverReplicas(keras.layers.Layer):
    def call(self, x):
        return kr.replica.all_mean(x)


def test_t11_collectives_outside_a_step():
    """T11: everything in kr.replica acts as on one replica."""
    assert float(kr.replica.all_sum(3.0)) == 3.0
    assert int(kr.replica.num_replicas()) == 1
    assert float(kr.replica.mean([1, 3])) == 2.0
    model = sequential((1,), AveragesOverReplicas())
    assert keras.ops.convert_to_numpy(model(column(1, 2))).tolist() == [[1.0], [2.0]]


def test_t14_options_of_a_job():
    """T14: expected_workers=1 and timeouts are accepted; num_replicas, model and optimizers."""
    trainer = kr.ReplicatedTrainer(
        toy, devices=cpus(2), expected_workers=1, peer_timeout=30, start_timeout=120
    )
    trainer.compile(optimizer="sgd", loss="mse")
    assert trainer.num_replicas == 2
    assert isinstance(trainer.model, keras.Model)
    assert trainer.optimizers == {"optimizer": trainer.model.optimizer}
