"""A mesh over two workers with two devices each, in real processes."""

import numpy as np
import pytest

from tests.helpers import assert_close
from tests.mesh.subjects import reference
from tests.multiworker.jobs import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCENARIOS = ("transformer", "custom", "over", "order")
FAILING = ("over", "order")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A function that gives the results of both workers for a scenario; all share one job."""
    folder = tmp_path_factory.mktemp("mesh_workers")
    np.savez(folder / "transformer.npz", *reference("transformer")[0])
    arguments = ("tests.mesh.workers", folder / "job", *SCENARIOS)
    job = run_job(*arguments, shared=folder, timeout=280, worker=2)

    def get(name):
        first, second = job.results(name)
        if name not in FAILING:
            assert "error" not in first, first["error"]
            assert "error" not in second, second["error"]
        return first, second

    return get


def tensors(lists):
    """Results as arrays: `assert_close` measures a number against the largest of its tensor."""
    return [np.array(numbers) for numbers in lists]


def test_two_workers_equal_one_device(outcome):
    first, second = outcome("transformer")
    plan, other = first.pop("plan"), second.pop("plan")
    assert "0 of 2 (chief)" in plan and "1 of 2" in other
    for words in ("4 devices: batch=2 x model=2", "each worker reads the whole of every batch"):
        assert words in plan and words in other
    assert first == second
    expected = reference("transformer")[1]
    assert first["iterations"] == 20
    assert_close(tensors(first["weights"]), expected.weights, what="weights")
    assert_close(first["history"], expected.history, what="history")
    assert_close(first["evaluation"], expected.evaluation, what="evaluate")
    assert_close(tensors([first["predictions"]]), [expected.predictions], what="predict")


def test_a_custom_step_resumes(outcome):
    """In mid-epoch; counts, outputs of `run` and checkpoints know each row once."""
    first, second = outcome("custom")
    assert first == second
    unbroken, resumed = first["unbroken"], first["resumed"]
    assert unbroken["history"]["rows"] == [21, 21, 21]
    for run in (resumed, unbroken):
        run["weights"] = tensors(run["weights"])
    assert_close(resumed, unbroken)
    assert np.shape(unbroken["outputs"]["x"]) == (6, 3)
    np.testing.assert_allclose(np.sum(unbroken["outputs"]["x"]), unbroken["outputs"]["sum"], 1e-5)


def test_weights_are_not_split_over_workers(outcome):
    for result in outcome("over"):
        for word in ("ValueError", "'model'", "over several workers of 2 device(s)", "Received: "):
            assert word in result["error"]


def test_another_order_of_rows_is_noticed(outcome):
    for result in outcome("order"):
        for word in ("WorkersDisagreeError", "Worker 1 reads other rows", "a seed"):
            assert word in result["error"]
