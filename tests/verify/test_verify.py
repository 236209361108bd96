"""trainer.verify and `keras-replicator verify`: in a process of its own, with clear errors."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_replicator as kr
from keras_replicator.verify import VerifyError
from keras_replicator.verify.report import Comparison, Difference, Report
from tests.helpers import cpus, network, run_python
from tests.verify import mistakes

X, Y, WEIGHTS = mistakes.data()


def compiled(step=None, build=network, **options):
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1), train_step=step)
    trainer.compile(**{"optimizer": keras.optimizers.SGD(0.1), **options})
    return trainer


@pytest.mark.multiprocess
def test_a_process_of_its_own_names_the_line(capsys):
    share = 0.5

    def step(model, batch):  # by value: no other process can import it
        x, y, weights = batch
        with tf.GradientTape() as tape:
            per_row = share * tf.reduce_mean(tf.square(y - model(x)), -1)
            loss = tf.reduce_sum(per_row * weights) / tf.reduce_sum(weights)  # this line
        variables = model.trainable_variables
        trainer.optimizers["optimizer"].apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    trainer = compiled(step)
    before = trainer.model.get_weights()
    report = trainer.verify(X, Y, WEIGHTS, replicas=(2, 4), batch_size=8, timeout=200)
    assert [comparison.replicas for comparison in report.comparisons] == [2, 4]
    assert not report.equal
    (cause,) = report.mistakes
    assert cause.kind == "a local denominator"
    assert "test_verify.py" in cause.where and "this line" in cause.line
    printed = capsys.readouterr().out
    assert "loss" in printed and "DIFFERS" in printed and "cause: a local denominator" in printed
    for old, new in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.multiprocess
def test_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "import tensorflow as tf\n"
        "def build():\n"
        "    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4),\n"
        "        keras.layers.BatchNormalization(name='norm'), keras.layers.Dense(2)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "def step(model, batch):\n"
        "    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)\n"
        "    with tf.GradientTape() as tape:\n"
        "        loss = tf.reduce_sum(tf.square(y - model(x, training=True)))\n"
        "    variables = model.trainable_variables\n"
        "    model.optimizer.apply(tape.gradient(loss, variables), variables)\n"
        "    return {'loss': loss}\n",
        encoding="utf-8",
    )
    command = ("-m", "keras_replicator", "verify", f"{tmp_path}/mine.py:build")
    options = ("--replicas", "2", "--batch-size", "8")
    result = run_python(*command, "--step", f"{tmp_path}/mine.py:step", *options)
    assert result.returncode == 1, result.stdout
    assert "cause: a sum" in result.stdout and "mine.py:11 in step" in result.stdout
    assert "cause: local BatchNormalization" in result.stdout and "'norm'" in result.stdout


@pytest.mark.parametrize("target", ["nothing", "tests.helpers:missing", "no.such.module:build"])
def test_what_cannot_be_loaded_is_named(target, capsys):
    from keras_replicator.launch.main import main

    with pytest.raises(SystemExit, match="2"):
        main(["verify", target])
    assert f"Received: '{target}'" in capsys.readouterr().err


def test_variables_outside_of_the_model_are_named():
    counter = tf.Variable(0.0, name="counter")

    def step(model, batch):
        counter.assign_add(1.0)
        return {}

    with pytest.raises(VerifyError, match=r"tf.Variable .*'counter:0'.* weight of the model"):
        compiled(step).verify(X, Y)


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def step(model, batch):
        with lock:
            return {}

    with pytest.raises(VerifyError, match="importable, or picklable by cloudpickle.*thread.lock"):
        compiled(step).verify(X, Y)


@pytest.mark.parametrize("replicas", [1, (), (2, 1)])
def test_replicas_are_at_least_two(replicas):
    with pytest.raises(ValueError, match="`replicas` must be numbers of replicas of at least 2"):
        compiled(loss="mse").verify(X, Y, replicas=replicas)


def test_verify_needs_a_compiled_trainer():
    with pytest.raises(ValueError, match="compile"):
        kr.ReplicatedTrainer(network, devices=cpus(1)).verify(X, Y)


def test_a_report_that_agrees():
    fine = Difference(1e-7, 5e-5, "dense/kernel", 1)
    report = Report((8, 8, 7), (Comparison(2, {"loss": fine, "gradient": fine}),))
    assert report.equal and not report.mistakes
    assert "All agree" in str(report) and "1.0e-07" in str(report) and "weights" not in str(report)
