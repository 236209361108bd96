"""Signals: saved at the next step, left with a documented code, in bounded time."""

import os
import signal
import threading
import time

import keras
import pytest

import keras_replicator as kr
from keras_replicator.callbacks.signals import Announced
from tests.helpers import cpus, regression, run_python

PREEMPTED = """
import os, signal, sys, time
import keras, numpy as np
import keras_replicator as kr

folder, number, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Stop(keras.callbacks.Callback):
    steps = 0
    def get_state(self):
        return {}
    def set_state(self, state):
        pass
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 9:
            os.kill(os.getpid(), number)
            if mode == "slow":
                print("slow", flush=True)
                time.sleep(60)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
trainer = kr.ReplicatedTrainer(model, seed=1)
trainer.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
every = "4 steps" if mode == "slow" else "100 steps"
callbacks = [kr.callbacks.Checkpoint(folder, every=every, grace=1 if mode == "slow" else 25)]
if mode != "resume":
    callbacks.append(Stop())
trainer.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, resume="auto", callbacks=callbacks)
print("iterations", int(model.optimizer.iterations))
"""


@pytest.mark.multiprocess
def test_signals_save_and_end_with_75(tmp_path):
    """SIGUSR1 under Slurm in mid-epoch: code 75, a checkpoint, and the next start goes on.

    That one is too slow for a grace of one second: it ends in time, from its last checkpoint the
    third start comes to the end.
    """
    folder = tmp_path / "checkpoints"
    arguments = ("-c", PREEMPTED, str(folder))
    first = run_python(*arguments, str(int(signal.SIGUSR1)), "", SLURM_JOB_ID="7")
    assert first.returncode == 75, first.stdout
    assert os.listdir(folder) == ["step-00000009"]
    second = run_python(*arguments, str(int(signal.SIGTERM)), "slow")
    assert second.returncode == 75, second.stdout
    assert "could not be saved within grace=1 seconds" in second.stdout
    assert sorted(os.listdir(folder)) == ["step-00000009", "step-00000012", "step-00000016"]
    third = run_python(*arguments, "0", "resume")
    assert third.returncode == 0, third.stdout
    assert "iterations 24" in third.stdout


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


class Sends(keras.callbacks.Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def on_train_batch_end(self, batch, logs=None):
        os.kill(os.getpid(), self.number)


def test_sigterm_in_process(tmp_path):
    """The handlers are those of before when the fit has ended, as it did."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = kr.ReplicatedTrainer(build, devices=cpus(2))
    trainer.compile("sgd", "mse")
    callbacks = [kr.callbacks.Checkpoint(tmp_path), Sends(signal.SIGTERM)]
    with pytest.raises(SystemExit) as left:
        trainer.fit(*regression(8), batch_size=2, verbose=0, callbacks=callbacks)
    assert left.value.code == 75
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [thread.name for thread in threading.enumerate()]


def test_a_fit_outside_of_the_main_thread(tmp_path):
    """Python allows no handlers there: the fit runs, and nobody listens."""
    trainer = kr.ReplicatedTrainer(build, devices=cpus(1))
    trainer.compile("sgd", "mse")

    def fit():
        callbacks = [kr.callbacks.Checkpoint(tmp_path)]
        trainer.fit(*regression(8), verbose=0, callbacks=callbacks)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_deadline_counts_from_the_signal():
    """Also while the main thread is busy; other users of the wake-up are told, too."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    seen, late = [], threading.Event()
    announced = Announced([signal.SIGUSR1], lambda: seen.append("signal"), 0.2, late.set)
    try:
        started = time.monotonic()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert late.wait(10)
        assert 0.1 < time.monotonic() - started < 10
        assert seen == ["signal"]
        assert os.read(reader, 8) == bytes([signal.SIGUSR1])
    finally:
        announced.close()
        assert signal.set_wakeup_fd(before) == writer
        os.close(reader)
        os.close(writer)


def test_without_a_deadline():
    late = threading.Event()
    announced = Announced([signal.SIGUSR1], lambda: None, None, late.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    announced.start_deadline()
    announced.close()
    assert not late.wait(0.3)
