"""Cases of parameter servers: a chief, two workers and one server, in real processes."""

import numpy as np
import pytest

from tests.multiworker.jobs import run_job

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Both cases in one job."""
    folder = tmp_path_factory.mktemp("parameter_server") / "job"
    return run_job("tests.multiworker.parameter_server", folder, chief=1, worker=2, ps=1)


def result(job, name):
    """What the chief found."""
    assert name in job.entries[0], job.report()
    return job.entries[0][name]


def test_every_role_ends_well(job):
    """Workers and servers end when the chief ends."""
    assert job.codes == [0, 0, 0, 0], job.report()


def test_b28_every_step_counts_once(job):
    """keras#18624: 20 steps are 20 iterations; w between 0.8 and 1.3; the loss is finite."""
    found = result(job, "b28")
    assert found["iterations"] == 20
    assert 0.8 <= found["w"] <= 1.3
    assert np.isfinite(found["loss"]).all()


def test_b28c_training_and_validation(job):
    """keras#18624: 5 epochs with loss and val_loss, iterations 40, val_loss at least halved."""
    found = result(job, "b28c")
    assert found["iterations"] == 40
    assert {name: len(values) for name, values in found["history"].items()} == {
        "loss": 5,
        "val_loss": 5,
    }
    assert found["history"]["val_loss"][-1] < 0.5 * found["history"]["val_loss"][0]
