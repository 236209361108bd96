"""watch, arrivals and marks: who is silent, who never came, and whether rows are the same."""

import concurrent.futures
import contextlib
import socket
import time

import numpy as np
import pytest
import tensorflow as tf

from keras_replicator.arrivals import wait_for_all
from keras_replicator.cluster import Cluster
from keras_replicator.data.fingerprint import differ, extend, marks_of
from keras_replicator.watch import Watch
from keras_replicator.workers import lost, task_names


class World:
    """Three peers that answer until they are told not to; time passes as they are asked."""

    def __init__(self, timeout=60):
        self.now = 100.0
        self.silent = {}  # task -> what `ask` returns
        self.aborted = []
        self.watch = Watch(
            peers={0: "chief", 1: "one", 2: "two"},
            worker=3,
            timeout=timeout,
            ask=lambda task, seconds: self.silent.get(task, True),
            abort=self.aborted.append,
            clock=lambda: self.now,
        )
        self.watch._stopping.wait = self.pass_time

    def pass_time(self, seconds):
        self.now += max(seconds, 0.1)
        for peer in self.watch.peers:
            self.watch.ask(peer)

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.pass_time(0.5)


def test_everybody_answers():
    world = World()
    world.run(100)
    assert world.watch.silent() == {}
    assert not world.watch.lost
    assert world.watch.culprits() == ()
    assert not world.aborted


def test_nobody_is_there_any_more():
    world = World()
    world.run(10)
    world.silent["one"] = False
    assert world.watch.culprits() == (1,)
    assert not world.aborted


def test_a_peer_that_is_slow_to_answer_is_not_blamed_beside_one_that_is_gone():
    world = World()
    world.run(10)
    world.silent["two"] = None
    world.run(4)
    world.silent["one"] = False
    assert world.watch.culprits() == (1,)


def test_silence_is_noticed_in_less_than_half_of_the_time():
    world = World(timeout=60)
    world.run(10)
    world.silent["two"] = None
    world.run(20)
    assert not world.aborted
    world.run(2)
    assert world.aborted == ["worker 2 has been silent for 22 seconds"]
    assert world.watch.culprits() == (2,)


def test_survivors_that_end_later_are_not_blamed():
    world = World()
    world.run(10)
    world.silent["chief"] = False
    world.run(world.watch.stay)
    world.silent["one"] = False
    world.run(3)
    world.silent["two"] = False
    world.run(20)
    assert world.watch.culprits() == (0,)


def test_losses_at_the_same_time_are_all_named():
    world = World()
    world.run(10)
    world.silent["chief"] = None
    world.run(0.5)
    world.silent["two"] = None
    world.run(10)
    assert world.watch.culprits() == (0, 2)


def test_a_peer_that_answers_again_is_not_lost():
    world = World()
    world.run(10)
    world.silent["one"] = False
    world.run(3)
    assert world.watch.lost
    del world.silent["one"]
    world.run(1)
    assert not world.watch.lost
    assert world.watch.silent() == {}


CLUSTER = Cluster(
    chief=("a:1",), worker=("b:1", "c:1"), task_type="worker", task_index=1, source="TF_CONFIG"
)


@pytest.mark.parametrize(
    "culprits, text",
    [
        ((0,), "Lost worker 0 (the chief) of the 3 workers of this job: its process has ended"),
        ((1,), "Lost worker 1 of the 3 workers of this job"),
        ((0, 1), "Lost worker 0 (the chief), worker 1, all at once: they have ended, or this"),
    ],
)
def test_message_of_a_loss(culprits, text):
    watch = Watch(peers={}, worker=2, timeout=60, ask=None, abort=None)
    watch.culprits = lambda: culprits
    cause = tf.errors.UnavailableError(
        None, None, "from /job:worker/replica:0/task:1: closed\nmore"
    )
    message = str(lost(cause, CLUSTER, watch))
    assert message.startswith(text)
    assert "fit(resume=directory)" in message
    # The task that TensorFlow names may be one that waits, too.
    assert message.endswith("TensorFlow says: from … closed")


def test_no_loss_is_no_message():
    watch = Watch(peers={}, worker=2, timeout=60, ask=None, abort=None)
    watch.culprits = lambda: ()
    assert lost(tf.errors.InternalError(None, None, "something else"), CLUSTER, watch) is None


def test_names_of_tasks_begin_with_the_chief():
    assert list(task_names(CLUSTER).values()) == [
        "/job:chief/replica:0/task:0",
        "/job:worker/replica:0/task:0",
        "/job:worker/replica:0/task:1",
    ]


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def wait_in_threads(addresses, workers, seconds):
    """What `wait_for_all` gives each of these workers."""
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        waiting = [pool.submit(wait_for_all, addresses, w, seconds) for w in workers]
        return [each.result() for each in waiting]


def test_workers_meet():
    addresses = free_addresses(3)
    assert wait_in_threads(addresses, [0, 1, 2], 30) == [(), (), ()]
    # The port is free at once for TensorFlow, which does not reuse addresses in use.
    with socket.socket() as server:
        server.bind(("", int(addresses[0].rpartition(":")[2])))


def test_a_worker_that_never_comes_is_named():
    addresses = [*free_addresses(3), "no.such.host.invalid:2222"]
    started = time.monotonic()
    assert wait_in_threads(addresses, [0, 2], 1) == [(1, 3), (1, 3)]
    assert time.monotonic() - started < 20


def test_a_worker_that_gave_up_was_seen():
    addresses = free_addresses(3)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(wait_for_all, addresses, 0, 1)
        second = pool.submit(wait_for_all, addresses, 1, 4)
        assert first.result() == (2,)
        assert second.result() == (2,)


def test_port_that_is_taken():
    (address,) = free_addresses(1)
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        with pytest.raises(OSError):
            wait_for_all([address, "127.0.0.1:1"], 0, 1)


# Marks of batches


def marks(*batch):
    return marks_of(batch).numpy().tolist()


X, Y = np.arange(60.0).reshape(20, 3).astype("float32"), np.arange(20)


@pytest.mark.parametrize(
    "part",
    [
        X,
        Y,
        X.astype("float64"),
        X.astype("float16"),
        X.astype("complex64"),
        X > 30,
        X.astype("str"),
        tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7, 8, 9]]),
        tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 5]]),
    ],
)
def test_marks_tell_the_order_of_rows(part):
    """Equal for equal rows, other for another order, with any kind of tensor."""
    rows = part.shape[0]
    if isinstance(part, tf.SparseTensor):
        turned = tf.sparse.from_dense(tf.sparse.to_dense(part)[::-1])
    else:
        part = part if isinstance(part, tf.RaggedTensor) else tf.constant(part)
        turned = tf.gather(part, list(range(rows))[::-1])
    assert marks(part) == marks(part)
    assert marks(part) != marks(turned)
    assert 0 <= marks(part)[0] < 2**31


def test_marks_tell_the_order_of_batches():
    first, second = marks_of((tf.constant(X[:4]),)), marks_of((tf.constant(X[4:8]),))
    zero = tf.zeros_like(first)
    there = extend(extend(zero, first), second).numpy().tolist()
    back = extend(extend(zero, second), first).numpy().tolist()
    assert there != back


def test_rows_are_the_same_while_a_part_is():
    one = marks(tf.constant(X), tf.constant(Y))
    assert not differ(one, marks(tf.constant(X + 1), tf.constant(Y)))
    assert differ(one, marks(tf.constant(X[::-1]), tf.constant(Y[::-1])))
    assert not differ([], [])


def test_marks_of_an_empty_batch():
    assert len(marks(tf.zeros([0, 3]), tf.zeros([0], tf.string))) == 2
