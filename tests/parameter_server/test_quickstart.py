"""The quick start, asynchronously: the accuracy of the synchronous run, within one point."""

import pytest

from tests.helpers import run_python
from tests.multiworker.test_quickstart import arguments, last_line

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def accuracy(done):
    assert done.returncode == 0, done.stdout[-4000:]
    return float(last_line(done.stdout).split()[2])


def test_three_workers_reach_the_synchronous_accuracy(tmp_path):
    command = ("-m", "keras_replicator", "launch", "--workers", "3", "--ps", "1")
    script = arguments(tmp_path, epochs=15)
    synchronous = accuracy(run_python(*script, timeout=240))
    done = run_python(*command, *script, timeout=600)
    assert "parameter servers" in done.stdout
    assert abs(accuracy(done) - synchronous) <= 0.01
