"""Every row of the registry on N replicas equals plain Keras on one device (contract, 1 to 7)."""

import functools

import pytest

from tests.helpers import assert_same_run, on_one_device, on_replicas
from tests.parity.registry import ROWS

REPLICAS = (1, 2, 3, 4, 8)
# What `make test` takes of each row, in turn, so that each count meets every third row.
SAMPLES = ((3,), (1, 4), (2,))


def cases():
    """(row, count) of the full matrix; what `make test` leaves out is marked slow."""
    for index, row in enumerate(ROWS):
        sampled = {*SAMPLES[index % len(SAMPLES)], *row.replicas}
        for replicas in REPLICAS:
            marks = () if replicas in sampled else pytest.mark.slow
            name = f"{row.name}-{replicas}".replace(", ", "-").replace(" ", "_")
            yield pytest.param(row, replicas, id=name, marks=marks)


@functools.cache
def reference(index):
    """(initial weights, run) of a row on one device."""
    row = ROWS[index]
    build = row.reference_build or row.build
    weights = build().get_weights()
    batch_size = row.batch_size * row.accumulate
    fit = {"batch_size": batch_size, "epochs": row.epochs}
    return weights, on_one_device(build, row.compile, row.data, weights, **fit)


@pytest.mark.parametrize("row, replicas", list(cases()))
def test_replicas_equal_one_device(row, replicas):
    weights, expected = reference(ROWS.index(row))
    more = {**row.compile_more, "gradient_accumulation_steps": row.accumulate}
    actual = on_replicas(
        replicas,
        row.build,
        lambda: {**row.compile(), **more},
        row.data,
        weights,
        batch_size=row.batch_size,
        epochs=row.epochs,
    )
    assert_same_run(actual, expected, row.rtol)
    assert actual.iterations == expected.iterations
    if hasattr(expected.optimizer, "dynamic_scale"):
        assert float(actual.optimizer.dynamic_scale) == float(expected.optimizer.dynamic_scale)
