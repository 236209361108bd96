"""Workers and servers that die: real processes, SIGKILL."""

import json
import re
import subprocess
import sys

import pytest

from tests.helpers import REPOSITORY, child_environment
from tests.multiworker.jobs import run_job
from tests.parameter_server.losses import STEPS

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_no_worker_left_is_a_named_error(tmp_path):
    job = run_job("tests.parameter_server.all_lost", tmp_path, chief=1, worker=1, ps=1)
    assert job.codes == [1, -9, 0], job.report()
    found = job.entries[0]
    assert "None of the 1 workers" in found["error"]
    assert found["seconds"] < 30


def test_a_worker_comes_back_and_a_lost_server_is_named(tmp_path):
    """A killed worker is replaced and used again; after a killed server the run is resumed."""
    command = [sys.executable, "-m", "keras_replicator", "launch", "--workers", "2", "--ps", "1"]
    script = REPOSITORY / "tests" / "parameter_server" / "losses.py"
    done = subprocess.run(
        [*command, "--max-restarts", "2", script, tmp_path],
        cwd=REPOSITORY,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert "worker 1 ended with code 137 and is replaced" in output
    assert re.search(r"ParameterServerLostError: Lost parameter server 0 \(127", output), output
    assert "the job is started again" in output
    came_back = int((tmp_path / "came_back").read_text())
    resumed = re.search(r"Resumed from .*step-0*(\d+): epoch 1, step", output)
    assert came_back <= int(resumed.group(1)) <= came_back + 25
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["iterations"] == STEPS
    assert found["rows"] == [4 * STEPS]
    assert found["steps"] == STEPS - int(resumed.group(1))
