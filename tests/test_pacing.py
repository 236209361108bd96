"""pacing: how many steps one call of the loop runs, so that every callback sees its batches."""

import keras
import pytest

from keras_replicator.pacing import Pacing, batch_interval

PHASES = ("train", "test", "predict")
# Seconds of a fast step; a power of 2, so that clocks add up exactly. A call aims at 0.1 seconds.
FAST = 1 / 1024


@pytest.fixture(autouse=True)
def fresh_keras():
    """No model is made here, so nothing of Keras has to be renewed for each test."""


class Clock:
    """A clock that moves by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def swapped():
    """SwapEMAWeights(swap_on_epoch=True): the only kind that looks at no batch."""
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


# What each callback of Keras asks for


@pytest.mark.parametrize(
    "make",
    [
        keras.callbacks.History,
        keras.callbacks.ProgbarLogger,
        keras.callbacks.EarlyStopping,
        keras.callbacks.ReduceLROnPlateau,
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        lambda: keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.RemoteMonitor,
        lambda: keras.callbacks.LambdaCallback(on_epoch_end=print),
        lambda: keras.callbacks.ModelCheckpoint("a.keras"),
        lambda: keras.callbacks.BackupAndRestore("backup"),
        lambda: keras.callbacks.TensorBoard("logs", profile_batch=0),
    ],
)
@pytest.mark.parametrize("phase", PHASES)
def test_callbacks_of_epochs(make, phase):
    assert batch_interval(make(), phase) is None


def test_checkpoint_of_every_eighth_batch():
    callback = keras.callbacks.ModelCheckpoint("a.keras", save_freq=8)
    assert [batch_interval(callback, phase) for phase in PHASES] == [8, None, None]


@pytest.mark.parametrize(
    "make",
    [
        keras.callbacks.TerminateOnNaN,
        lambda: keras.callbacks.LambdaCallback(on_train_batch_end=print),
        lambda: keras.callbacks.LambdaCallback(on_train_batch_begin=print),
        lambda: keras.callbacks.TensorBoard("logs", update_freq="batch", profile_batch=0),
        # These count the calls of their hooks, see test_callback_batches.py.
        lambda: keras.callbacks.BackupAndRestore("backup", save_freq=8),
        lambda: keras.callbacks.TensorBoard("logs", update_freq=8, profile_batch=0),
        lambda: keras.callbacks.TensorBoard("logs", profile_batch=2),
        lambda: keras.callbacks.TensorBoard("logs", profile_batch=(2, 4)),
    ],
)
def test_callbacks_of_every_batch(make):
    assert batch_interval(make()) == 1


def test_swap_of_averages_for_evaluation():
    """It swaps weights around a whole evaluation, not around a batch."""
    for phase in PHASES:
        assert batch_interval(swapped(), phase) is None


@pytest.mark.parametrize(
    "hook, phases",
    [
        ("on_batch_begin", ["train"]),
        ("on_batch_end", ["train"]),
        ("on_train_batch_begin", ["train"]),
        ("on_train_batch_end", ["train"]),
        ("on_test_batch_begin", ["test"]),
        ("on_test_batch_end", ["test"]),
        ("on_predict_batch_begin", ["predict"]),
        ("on_predict_batch_end", ["predict"]),
        ("on_epoch_begin", []),
        ("on_epoch_end", []),
        ("on_train_end", []),
    ],
)
def test_own_callback(hook, phases):
    """A hook of batches, in the class or in the object, counts in its phase."""
    own = type("Own", (keras.callbacks.Callback,), {hook: lambda self, *arguments: None})()
    assert [phase for phase in PHASES if batch_interval(own, phase) == 1] == phases
    patched = keras.callbacks.Callback()
    setattr(patched, hook, lambda *arguments: None)
    assert [phase for phase in PHASES if batch_interval(patched, phase) == 1] == phases


@pytest.mark.parametrize("interval", [None, 1, 5])
def test_own_callback_that_declares_its_interval(interval):
    class Own(keras.callbacks.Callback):
        batch_interval = interval

        def on_train_batch_end(self, batch, logs=None):
            pass

    assert batch_interval(Own()) == interval


def test_subclass_of_tensorboard_with_a_hook_of_its_own():
    class Own(keras.callbacks.TensorBoard):
        def on_train_batch_end(self, batch, logs=None):
            pass

    assert batch_interval(Own("logs", profile_batch=0)) == 1


@pytest.mark.parametrize(
    "base, arguments",
    [
        (keras.callbacks.History, ()),
        (keras.callbacks.ProgbarLogger, ()),
        (keras.callbacks.EarlyStopping, ()),
        (keras.callbacks.ModelCheckpoint, ("a.keras",)),
        (keras.callbacks.BackupAndRestore, ("backup",)),
    ],
)
def test_subclass_with_a_hook_of_its_own(base, arguments):
    class Own(base):
        def on_train_batch_end(self, batch, logs=None):
            pass

    assert batch_interval(Own(*arguments)) == 1


# Pacing


def paced(steps, callbacks=(), seconds_per_step=FAST, calls=8, remaining=None):
    """The number of steps of each of the first calls."""
    clock = Clock()
    pacing = Pacing(steps, list(callbacks), clock=clock)
    position, made = 0, []
    for _ in range(calls):
        steps_now = pacing.begin(position, None if remaining is None else remaining - position)
        clock.now += steps_now * seconds_per_step
        pacing.end(steps_now)
        position += steps_now
        made.append(steps_now)
    return made


def test_auto_grows_to_a_tenth_of_a_second():
    assert paced("auto") == [1, 1, 8, 64, 102, 102, 102, 102]


def test_auto_keeps_slow_steps_apart():
    assert paced("auto", seconds_per_step=0.3) == [1] * 8


def test_auto_shrinks_when_steps_become_slow():
    clock = Clock()
    pacing = Pacing("auto", [], clock=clock)
    for step, right in [(1, 1), (FAST, 1), (FAST, 8), (1 / 128, 64), (1 / 2, 12), (1 / 2, 1)]:
        steps = pacing.begin(0)
        assert steps == right
        clock.now += steps * step
        pacing.end(steps)


def test_the_first_call_compiles_and_teaches_nothing():
    clock = Clock()
    pacing = Pacing("auto", [], clock=clock)
    pacing.begin(0)
    clock.now += 0.0  # infinitely fast
    pacing.end(1)
    assert pacing.begin(1) == 1


def test_a_call_without_steps_teaches_nothing():
    clock = Clock()
    pacing = Pacing("auto", [], clock=clock)
    for steps in (1, 1, 0):
        pacing.begin(0)
        clock.now += steps * FAST
        pacing.end(steps)
    assert pacing.begin(0) == 8


def test_auto_stops_where_a_callback_looks():
    callback = keras.callbacks.ModelCheckpoint("a.keras", save_freq=10)
    steps = paced("auto", [callback])
    ends = [sum(steps[: call + 1]) for call in range(len(steps))]
    assert steps == [1, 1, 8, 10, 10, 10, 10, 10]
    assert set(range(10, ends[-1] + 1, 10)) <= set(ends)


def test_auto_stops_where_any_of_two_callbacks_looks():
    callbacks = [
        keras.callbacks.ModelCheckpoint("a.keras", save_freq=6),
        keras.callbacks.ModelCheckpoint("b.keras", save_freq=4),
    ]
    steps = paced("auto", callbacks, calls=12)
    ends = {sum(steps[: call + 1]) for call in range(len(steps))}
    assert {4, 6, 8, 12, 16, 18, 20, 24} <= ends


def test_auto_stops_at_every_batch_for_a_callback_of_batches():
    assert paced("auto", [keras.callbacks.TerminateOnNaN()]) == [1] * 8


def test_callbacks_of_another_phase_do_not_slow_down():
    pacing = Pacing("auto", [keras.callbacks.TerminateOnNaN()], phase="predict")
    assert not pacing.watched


@pytest.mark.parametrize("steps", [1, 20])
def test_fixed_number_of_steps(steps):
    """As in Keras, a number of the user's is kept, whatever callbacks ask for."""
    callbacks = [keras.callbacks.TerminateOnNaN()]
    assert paced(steps, callbacks, seconds_per_step=1.0) == [steps] * 8


def test_no_more_than_what_remains():
    assert paced(20, calls=3, remaining=50) == [20, 20, 10]
    assert paced("auto", calls=6, remaining=100) == [1, 1, 8, 64, 26, 0]


def test_watched():
    assert not Pacing("auto", [keras.callbacks.EarlyStopping()]).watched
    assert Pacing("auto", [keras.callbacks.TerminateOnNaN()]).watched
    assert Pacing(5, [keras.callbacks.ModelCheckpoint("a.keras", save_freq=8)]).watched
