"""Forecasts: the ring's formula, the measured profile, and `keras-replicator plan script.py`."""

import dataclasses
import re

import keras
import numpy as np
import pytest

import keras_replicator as kr
from keras_replicator.launch.main import main
from keras_replicator.scaling import Profile, parse_bandwidth, parse_seconds, predict, ring_seconds
from tests.helpers import cpus, network, regression, run_python, sequential

PROFILE = Profile("a device", 64, 0.010, 0.001, 100_000_000, 0, 300_000_000, 1e6)
X, Y = regression(40)


def test_the_ring_moves_each_byte_twice_less_the_own_share():
    assert ring_seconds(8e6, 1, 1e9, 1.0) == 0.0
    assert ring_seconds(8e6, 2, 1e9) == pytest.approx(8e-3)
    assert ring_seconds(8e6, 8, 1e9, 1e-5) == pytest.approx(14e-3 + 14e-5)


def test_a_forecast_by_hand():
    forecast = predict(PROFILE, gpus=2, workers=2, bandwidth="10GB/s", latency="0us")
    assert forecast.rows_per_replica == (16, 16, 16, 16)
    assert forecast.compute_seconds == pytest.approx(0.010 + 0.016)
    assert forecast.reduce_seconds == pytest.approx(2 * 3 / 4 * 0.01)
    assert forecast.step_seconds == pytest.approx(0.041)
    assert forecast.efficiency == pytest.approx(0.026 / 0.041)
    assert forecast.rows_per_second == pytest.approx(64 / 0.041)
    assert forecast.memory_bytes == 300_000_000 + 16e6
    assert [row[0] for row in forecast.table] == [1, 2, 4]
    assert forecast.table[0][-1] == 1.0


def test_uneven_rows_wait_for_the_largest_replica():
    forecast = predict(PROFILE, gpus=3, batch_size=10)
    assert sorted(forecast.rows_per_replica) == [3, 3, 4]
    assert forecast.compute_seconds == pytest.approx(0.014)
    assert forecast.efficiency < 10 / 12


def test_accumulation_reduces_gradients_less_often():
    often = predict(PROFILE, gpus=4)
    seldom = predict(dataclasses.replace(PROFILE, accumulation=4), gpus=4)
    assert seldom.reduce_seconds == pytest.approx(often.reduce_seconds / 4)


def test_a_faster_device_only_computes_faster():
    slow, fast = predict(PROFILE, gpus=4), predict(PROFILE, gpus=4, speedup=10.0)
    assert fast.compute_seconds == pytest.approx(slow.compute_seconds / 10)
    assert fast.reduce_seconds == slow.reduce_seconds
    assert "10 times as fast" in str(fast)


def test_what_a_forecast_prints():
    text = str(predict(PROFILE, gpus=8, workers=4, bandwidth="25GB/s"))
    for part in ("32 on 4 worker", "64 rows, 2 per replica", "302 MB", "100 MB", "25 GB/s"):
        assert part in text, text
    assert re.search(r"^ +32 .*%$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "text, value", [("25GB/s", 25e9), ("10 Gb/s", 1.25e9), ("100Mbps", 12.5e6), (3.0, 3.0)]
)
def test_bandwidths(text, value):
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize("text, value", [("10us", 1e-5), ("0.5 ms", 5e-4), (0.1, 0.1)])
def test_latencies(text, value):
    assert parse_seconds(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"bandwidth": "fast"}, r"`bandwidth` must be .* Received: bandwidth='fast'"),
        ({"latency": "soon"}, r"`latency` must be .* Received: latency='soon'"),
        ({"gpus": 0}, r"`gpus` must be an int of at least 1. Received: gpus=0"),
        ({"workers": 1.5}, r"`workers` must be an int of at least 1. Received: workers=1.5"),
        ({"speedup": 0}, r"`speedup` must be above 0. Received: speedup=0"),
    ],
)
def test_hardware_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(PROFILE, **arguments)


def compiled(build=network, **options):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1), seed=0)
    trainer.compile(**{"optimizer": keras.optimizers.Adam(0.1), "loss": "mse", **options})
    return trainer


def test_a_measured_profile_counts_bytes():
    def build():
        return sequential((3,), keras.layers.Dense(4), keras.layers.BatchNormalization())

    trainer = compiled(build, gradient_accumulation_steps=2)
    before = trainer.model.get_weights()
    profile = trainer.measure(X, Y[:, [0, 0, 0, 0]], batch_size=16)
    trainable = 4 * (3 * 4 + 4 + 4 + 4)  # kernel, bias, gamma, beta, in float32
    assert profile.update_bytes == trainable
    assert profile.step_bytes == 4 * (4 + 4)
    slots = sum(v.numpy().nbytes for v in trainer.model.optimizer.variables)
    assert profile.state_bytes == 2 * trainable + profile.step_bytes + slots
    assert profile.accumulation == 2 and profile.batch_size == 16
    assert profile.compute_seconds(16) > 0
    assert trainer.plan.on(gpus=2).replicas == 2
    for old, new in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(trainer.model.optimizer.iterations) == 0


def test_more_rows_take_longer():
    def build():
        return sequential((256,), keras.layers.Dense(1024, "tanh"), keras.layers.Dense(1))

    x = np.ones((64, 256), "float32")
    profile = compiled(build).measure(x, x[:, :1], batch_size=2048)
    assert profile.seconds_per_row > 0
    assert profile.compute_seconds(2048) > 1.2 * profile.compute_seconds(64)


def test_a_forecast_needs_a_measurement():
    with pytest.raises(ValueError, match=r"trainer.measure\(x, y, batch_size=…\) first"):
        compiled().plan.on(gpus=2)


SCRIPT = """
import sys
import keras, numpy as np
import keras_replicator as kr
kr.simulate_devices(2)
trainer = kr.ReplicatedTrainer(
    lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
)
trainer.compile("sgd", "mse")
x = np.ones((64, 3), "float32")
trainer.fit(x, x[:, :1], batch_size=int(sys.argv[sys.argv.index("--rows-of-batch") + 1]))
print("trained")
"""


@pytest.mark.multiprocess
def test_a_script_is_planned_and_not_trained(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    hardware = ("--gpus", "8", "--workers", "4", "--bandwidth", "25GB/s")
    result = run_python(
        *("-m", "keras_replicator", "plan", str(tmp_path / "script.py")),
        *(*hardware, "--rows-of-batch", "64"),
    )
    assert result.returncode == 0, result.stdout
    assert "trained" not in result.stdout and "Epoch" not in result.stdout
    for part in ("32 on 4 worker(s)", "64 rows, 2 per replica", "reduced per update", "104 B"):
        assert part in result.stdout, result.stdout


def test_a_plan_of_a_script_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "nothing.py"])
    assert "there is no such script. Received: 'nothing.py'" in capsys.readouterr().err


def test_a_plan_with_a_bandwidth_that_cannot_be(tmp_path, capsys):
    (tmp_path / "script.py").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(tmp_path / "script.py"), "--bandwidth", "fast"])
    assert "Received: bandwidth='fast'" in capsys.readouterr().err
