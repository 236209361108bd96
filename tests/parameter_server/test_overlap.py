"""The bound on staleness: which steps may be under way at the same time."""

import random

import pytest

from keras_replicator.engines.overlap import Overlap


def simulate(max_staleness, most, steps=400, seed=0):
    """Starts steps as soon as they may and ends them in random order.

    Returns:
        `(staleness of each step, how many were under way at most)`. A step reads when it starts
        and updates when it ends, so its staleness is the number of ends in between.
    """
    chance, overlap = random.Random(seed), Overlap(max_staleness, most)
    begun, ended, reads, staleness, widest = 0, 0, {}, [], 0
    while ended < steps:
        while begun < steps and overlap.may_start():
            overlap.start(begun)
            reads[begun] = ended
            begun += 1
        widest = max(widest, len(overlap))
        step = chance.choice(sorted(reads))
        overlap.finish(step)
        staleness.append(ended - reads.pop(step))
        ended += 1
    return staleness, widest


@pytest.mark.parametrize("bound", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("most", [1, 2, 4, 16])
def test_no_step_is_staler_than_the_bound(bound, most):
    staleness, widest = simulate(bound, most)
    assert max(staleness) <= bound
    assert widest == min(bound + 1, most)
    if most > bound:
        assert max(staleness) == bound


def test_without_a_bound_every_place_is_taken():
    staleness, widest = simulate(None, 4)
    assert widest == 4
    assert max(staleness) > 4


def test_one_after_the_other():
    overlap = Overlap(0, 4)
    overlap.start(0)
    assert not overlap.may_start()
    overlap.finish(0)
    assert overlap.may_start()


def test_a_slow_step_holds_others_back_only_when_its_bound_is_reached():
    overlap = Overlap(2, 4)
    overlap.start("slow")
    for step in range(2):
        assert overlap.may_start()
        overlap.start(step)
        overlap.finish(step)
    assert not overlap.may_start()
    overlap.finish("slow")
    assert overlap.may_start()


def test_what_is_forgotten_holds_nobody_back():
    overlap = Overlap(0, 1)
    overlap.start(0)
    overlap.clear()
    assert len(overlap) == 0
    assert overlap.may_start()
