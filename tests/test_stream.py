"""stream: what `steps_per_epoch` means for data of known, unknown and endless size."""

import threading
import time
import types
import warnings

import pytest
import tensorflow as tf

from keras_replicator.agreement import Agreement
from keras_replicator.data.arrays import ArraySource
from keras_replicator.data.datasets import DatasetSource, OwnSource
from keras_replicator.data.source import prefetched
from keras_replicator.epochs import run_epoch
from keras_replicator.stream import Stream


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


class FakeSource:
    """Batches that are pairs (pass, number of the batch in that pass).

    Args:
        batches: How many a pass has; None for endless data.
        known: Whether the source knows that number.
        passes: How often the data can be read: a generator gives nothing more after one pass.
    """

    is_counted = is_tuned = False

    def __init__(self, batches, known=True, passes=None):
        self.num_batches = batches if known else None
        self.batches = batches
        self.passes = passes
        self.one_pass = passes is not None
        self.opened = []
        self.begun = self.ended = self.caught_up = 0
        self.can_seek = known

    def iterator(self, epoch, start=0):
        exhausted = self.passes is not None and len(self.opened) >= self.passes
        self.opened.append((epoch, start))
        end = start if exhausted else self.batches if self.batches is not None else 10**6
        return iter([(epoch, number) for number in range(start, min(end, start + 100))])

    made_for = ""

    def facts(self):
        return {"the batches": self.batches}

    def place(self, iterator):
        return "place"

    def resume(self, number, start, passes, place=None):
        self.resumed = (number, start, passes, place)
        return self.iterator(number, start)

    def catch_up(self, epochs):
        self.caught_up = epochs

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


class Loop:
    """Reads up to `steps` batches, as the compiled loop does; remembers them."""

    one_by_one = False
    marks = ()

    def __init__(self):
        self.seen = []

    def __call__(self, iterator, steps, position=0, lasts=False, remaining=None, ahead=None):
        before = len(self.seen)
        for _ in range(steps):
            batch = next(iterator, None)
            if batch is None:
                break
            self.seen.append(batch)
        done = len(self.seen) - before
        return done, done, ()

    def finish(self):
        return 0, 0


AGREEMENT = Agreement(types.SimpleNamespace(num_workers=1))
HOOKS = types.SimpleNamespace(
    begin=lambda step: None, end=lambda step, outputs: None, stopped=lambda: False
)


class Pacing:
    """A fixed number of steps each call, at most what remains."""

    least = 1

    def __init__(self, steps):
        self.steps = steps

    def begin(self, position, remaining=None):
        return self.steps if remaining is None else min(self.steps, remaining)

    def ahead(self, position):
        return None

    def end(self, steps):
        pass


def epochs(source, steps=None, count=3, per_call=1, start=0):
    """(batches of each epoch, stream)."""
    stream = Stream(source, steps)
    result = []
    for epoch in range(count):
        loop = Loop()
        first = start if epoch == 0 else 0
        stream.begin_epoch(epoch, first)
        run_epoch(AGREEMENT, loop, stream, Pacing(per_call), HOOKS, start=first)
        stream.end_epoch()
        result.append(loop.seen)
    return result, stream


def whole(number, batches):
    """The batches of one pass."""
    return [(number, batch) for batch in range(batches)]


per_call = pytest.mark.parametrize("per_call", [1, 3, 100])


# Without steps_per_epoch


@per_call
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_every_epoch_reads_the_data_once(known, per_call):
    source = FakeSource(4, known)
    seen, stream = epochs(source, per_call=per_call)
    assert seen == [whole(0, 4), whole(1, 4), whole(2, 4)]
    assert (source.begun, source.ended) == (3, 3)
    assert stream.steps_per_epoch == 4  # known from the second epoch on, as in Keras


def test_unknown_size_is_unknown_in_the_first_epoch():
    assert Stream(FakeSource(4, known=False)).steps_per_epoch is None


def test_epoch_that_resumes():
    seen, _ = epochs(FakeSource(4), count=2, start=3)
    assert seen == [[(0, 3)], whole(1, 4)]


# With steps_per_epoch


@per_call
def test_one_iterator_goes_on_over_epochs(per_call):
    """Endless data are never read from their start again."""
    source = FakeSource(None)
    seen, _ = epochs(source, steps=3, per_call=per_call)
    assert seen == [[(0, number) for number in range(at, at + 3)] for at in (0, 3, 6)]
    assert source.opened == [(0, 0)]


@per_call
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_data_that_end_in_mid_epoch_end_it(known, per_call):
    """4 batches, 3 steps per epoch: as in Keras the second epoch is short, the third is whole."""
    with pytest.warns(UserWarning, match="The data ended after 1 of the 3 steps") as warned:
        seen, _ = epochs(FakeSource(4, known), steps=3, count=4, per_call=per_call)
    assert seen == [whole(0, 3), [(0, 3)], whole(1, 3), [(1, 3)]]
    assert len(warned) == 1


@per_call
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_more_steps_than_batches(known, per_call):
    with pytest.warns(UserWarning, match="The data ended after 2 of the 5 steps") as warned:
        seen, _ = epochs(FakeSource(2, known), steps=5, per_call=per_call)
    assert seen == [whole(0, 2), whole(1, 2), whole(2, 2)]
    assert len(warned) == 1


@per_call
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_data_that_end_with_an_epoch_start_again(known, per_call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen, _ = epochs(FakeSource(4, known), steps=2, per_call=per_call)
    assert seen == [whole(0, 2), [(0, 2), (0, 3)], whole(1, 2)]


def test_resumed_stream_opens_the_pass_it_was_in():
    """4 batches, 3 steps per epoch: epochs of 3, 1 and 3 steps. Step 1 of the third is batch 1."""
    source = FakeSource(4)
    stream = Stream(source, 3)
    stream.begin_epoch(2, start=1)
    assert source.opened == [(1, 1)]
    assert stream.available(10) == 3


def test_second_run_begins_with_the_first_batch():
    """Rows are shuffled as in epoch 5 of the trainer, which is the first one of this run."""
    source = FakeSource(4)
    stream = Stream(source, 2)
    stream.begin_epoch(5, earlier=0)
    assert source.opened == [(5, 0)]


def test_rewound_stream_begins_with_the_first_batch():
    source = FakeSource(None)
    stream = Stream(source, 2, "validation_steps")
    for _ in range(2):
        stream.rewind()
        stream.begin_epoch(0)
        run_epoch(AGREEMENT, Loop(), stream, Pacing(2), HOOKS)
    assert source.opened == [(0, 0), (0, 0)]


@per_call
def test_data_that_end_early_warn_once(per_call):
    """5 batches of unknown number, 2 epochs of 3 steps promised: the second is short."""
    source = FakeSource(5, known=False)
    with pytest.warns(UserWarning, match="The data ended after 2 of the 3 steps") as warned:
        seen, _ = epochs(source, steps=3, count=2, per_call=per_call)
    assert seen == [whole(0, 3), [(0, 3), (0, 4)]]
    assert len(warned) == 1
    assert "`steps_per_epoch` promises" in str(warned[0].message)
    assert "dataset.repeat()" in str(warned[0].message)


def test_warning_names_its_argument():
    stream = Stream(FakeSource(2, known=False), 3, "validation_steps")
    stream.begin_epoch(0)
    with pytest.warns(UserWarning, match="`validation_steps` promises"):
        run_epoch(AGREEMENT, Loop(), stream, Pacing(1), HOOKS)


def test_data_that_always_end_early_warn_once_in_all():
    with pytest.warns(UserWarning, match="The data ended") as warned:
        seen, _ = epochs(FakeSource(2, known=False), steps=3, count=4)
    assert len(warned) == 1
    assert [len(batches) for batches in seen][0] == 2


def test_data_that_end_with_their_epoch_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen, _ = epochs(FakeSource(6, known=False), steps=3, count=2)
    assert seen == [whole(0, 3), [(0, 3), (0, 4), (0, 5)]]


# Errors


@pytest.mark.parametrize("steps", [None, 3])
def test_data_without_batches(steps):
    with pytest.raises(ValueError, match="The data hold no batches. Pass data with at least one"):
        epochs(FakeSource(0, known=False), steps=steps, count=1)


def test_generator_that_was_read_to_its_end():
    with pytest.raises(ValueError, match="a generator that has been read to its end gives nothing"):
        epochs(FakeSource(2, known=False, passes=1), count=2)


@pytest.mark.parametrize("steps", [0, -1, 2.5])
@pytest.mark.parametrize("argument", ["steps_per_epoch", "validation_steps", "steps"])
def test_steps_below_one(argument, steps):
    message = f"`{argument}` must be an int of at least 1. Received: {argument}={steps}"
    with pytest.raises(ValueError, match=message):
        Stream(FakeSource(4), steps, argument)


# ------------------------------------------------------------------------------ ends of iterators


class SlowToEnd:
    """An iterator that takes a while to end, as those that tf.data tunes may."""

    ended_on = None

    def __del__(self):
        time.sleep(0.5)
        SlowToEnd.ended_on = threading.current_thread().name


def test_nobody_waits_for_the_end_of_a_tuned_iterator():
    source = FakeSource(3)
    source.is_tuned, source.iterator = True, lambda number, start: SlowToEnd()
    stream = Stream(source)
    stream.begin_epoch(0)
    begun = time.monotonic()
    stream.end_epoch()
    stream.begin_epoch(1)
    assert time.monotonic() - begun < 0.4
    stream.end_epoch()  # the first one has ended by then
    assert time.monotonic() - begun >= 0.5
    assert SlowToEnd.ended_on == "keras_replicator_let_go"


@pytest.mark.parametrize(
    "is_tuned, enabled", [(False, False), (True, True)], ids=["ours", "the user's"]
)
def test_what_tf_data_tunes(is_tuned, enabled):
    """Our own pipelines are not tuned; what the user has said of his stays."""
    options = tf.data.Options()
    options.autotune.enabled = True
    dataset = tf.data.Dataset.range(3).with_options(options)
    assert prefetched(dataset, is_tuned).options().autotune.enabled is enabled
    assert DatasetSource.is_tuned and OwnSource.is_tuned and not ArraySource.is_tuned
