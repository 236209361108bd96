"""data.split: the balanced, order-preserving split of a global batch (contract, point 1)."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_replicator.data.sources import make_source
from keras_replicator.data.split import Shard, boundary
from keras_replicator.plan import Plan

# Row counts around every multiple of the part counts, and large ones.
ROWS = (*range(0, 26), 64, 1000, 2**31 - 1)
PARTS = (1, 2, 3, 4, 7, 8)
# (workers, replicas of each)
JOBS = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 2)]


@pytest.fixture(autouse=True)
def fresh_keras():
    """Nothing here touches Keras, so nothing of it has to be renewed for each test."""


def sizes(rows, parts):
    cuts = [boundary(rows, part, parts) for part in range(parts + 1)]
    return [end - begin for begin, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("parts", PARTS)
def test_every_row_is_in_one_part(parts):
    for rows in ROWS:
        assert boundary(rows, 0, parts) == 0
        assert boundary(rows, parts, parts) == rows
        assert min(sizes(rows, parts)) >= 0  # boundaries never go back: the order is kept


@pytest.mark.parametrize("parts", PARTS)
def test_sizes_differ_by_at_most_one(parts):
    for rows in ROWS:
        assert max(sizes(rows, parts)) - min(sizes(rows, parts)) <= 1, f"{rows} rows"


def test_fewer_rows_than_parts_leave_some_empty():
    assert sorted(sizes(3, 8)) == [0, 0, 0, 0, 0, 1, 1, 1]


def shards(workers, replicas):
    """The shards of all workers of a job."""
    total = workers * replicas
    return [Shard(worker * replicas, replicas, total) for worker in range(workers)]


@pytest.mark.parametrize("workers, replicas", JOBS)
def test_workers_and_their_replicas_make_the_whole(workers, replicas):
    """Splitting over workers and then over replicas is splitting over all replicas at once."""
    for rows in range(26):
        batch, seen = list(range(rows)), []
        for shard in shards(workers, replicas):
            begin, end = shard.rows(rows)
            mine = batch[begin:end]
            for replica in range(shard.first, shard.first + shard.count):
                begin, end = shard.replica_rows(rows, replica)
                assert 0 <= begin <= end <= len(mine)
                seen.append(mine[begin:end])
        assert list(itertools.chain(*seen)) == batch
        assert [len(part) for part in seen] == sizes(rows, workers * replicas)


def test_shard_is_whole():
    assert Shard().is_whole
    assert Shard(0, 4, 4).is_whole
    assert [shard.is_whole for shard in shards(2, 2)] == [False, False]


@pytest.mark.parametrize("rows", [0, 1, 6, 13])
def test_tensors_split_as_numbers_do(rows):
    """Rows and the number of the replica may be known at run time only."""
    shard = Shard(2, 2, 6)
    for replica in (2, 3):
        split = shard.replica_rows(tf.constant(rows), tf.constant(replica))
        assert tuple(int(cut) for cut in split) == shard.replica_rows(rows, replica)
    assert tuple(int(cut) for cut in shard.rows(tf.constant(rows))) == shard.rows(rows)


@pytest.mark.parametrize("replicas", PARTS)
def test_the_plan_announces_the_same_split(replicas):
    plan = Plan("mirrored", tuple(f"CPU:{i}" for i in range(replicas)), replicas)
    assert list(plan.rows_per_replica(13)) == sizes(13, replicas)


@pytest.mark.parametrize("worker", [0, 1])
def test_arrays_of_workers_without_rows(worker):
    """Two batches of one row, of which worker 1 has the row, and worker 0 reads it."""
    source = make_source(np.arange(2.0), batch_size=1, shard=Shard(worker, 1, 2))
    found = [(int(rows), batch.numpy().tolist()) for rows, batch, *_ in source.iterator(0)]
    assert found == [(1, [0.0]), (1, [1.0])]


def test_workers_with_parts_of_another_size_run_the_same_step():
    specs = {
        make_source(np.arange(12.0), batch_size=3, shard=Shard(worker, 1, 2)).element_spec[1]
        for worker in range(2)
    }
    assert specs == {tf.TensorSpec([None], tf.float32)}


def test_shapes_are_known_where_no_batch_is_partial():
    whole, tail = (make_source(np.arange(n * 1.0), batch_size=3) for n in (12, 13))
    assert whole.element_spec[1].shape == [3] and tail.element_spec[1].shape == [None]
