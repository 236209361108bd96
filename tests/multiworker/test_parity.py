"""The parity registry over processes: workers with one or more devices equal one device."""

import functools

import keras
import numpy as np
import pytest

from tests.helpers import assert_close
from tests.multiworker.jobs import run_job
from tests.parity.registry import ROWS
from tests.parity.test_parity import reference

# All rows of a shape share their processes, whose own limit comes first.
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1500)]

# (workers, devices of each)
SHAPES = ((2, 1), (2, 2), (3, 1))
# What `make test` runs, on 2 workers with 2 devices each.
SAMPLE = {"tail of 1", "accumulation, partial"}


def cases():
    """(row, shape); what `make test` leaves out is marked slow."""
    for shape in SHAPES:
        for index, row in enumerate(ROWS):
            marks = () if shape == (2, 2) and row.name in SAMPLE else pytest.mark.slow
            name = f"{row.name}-{shape[0]}x{shape[1]}".replace(", ", "-").replace(" ", "_")
            yield pytest.param(index, shape, id=name, marks=marks)


@pytest.fixture(scope="module")
def outcome(request, tmp_path_factory):
    """A function of a row and a shape: what the row left behind on each worker.

    All rows that were asked for share the processes of a shape.
    """
    asked = [item.callspec.params for item in request.session.items if item.path.samefile(__file__)]

    @functools.cache
    def job(shape):
        folder = tmp_path_factory.mktemp(f"parity{shape[0]}x{shape[1]}")
        names = []
        for index in sorted({case["index"] for case in asked if case["shape"] == shape}):
            names.append(ROWS[index].name)
            np.savez(folder / f"{names[-1]}.npz", *reference(index)[0])
        return run_job(
            "tests.multiworker.parity",
            folder / "job",
            shape[1],
            *names,
            shared=folder,
            timeout=max(280, 30 * len(names)),
            worker=shape[0],
        )

    def get(index, shape):
        results = job(shape).results(ROWS[index].name)
        for result in results:
            assert "error" not in result, result["error"]
        return results

    return get


@pytest.mark.parametrize("index, shape", list(cases()))
def test_workers_equal_one_device(outcome, index, shape):
    row, (_, expected) = ROWS[index], reference(index)
    first, *others = outcome(index, shape)
    assert all(other == first for other in others), "the workers differ"
    assert first["replicas"] == shape[0] * shape[1]
    # Arrays again: the tolerance is that of a tensor, not of each of its numbers.
    weights = [np.asarray(weight) for weight in first["weights"]]
    predictions = keras.tree.map_structure_up_to(
        expected.predictions, np.asarray, first["predictions"]
    )
    assert_close(weights, expected.weights, row.rtol, "weights")
    assert_close(first["history"], expected.history, row.rtol, "history")
    assert_close(first["evaluation"], expected.evaluation, row.rtol, "evaluate")
    assert_close(predictions, expected.predictions, row.rtol, "predict")
    assert first["iterations"] == expected.iterations
    if hasattr(expected.optimizer, "dynamic_scale"):
        assert first["scale"] == float(expected.optimizer.dynamic_scale)
