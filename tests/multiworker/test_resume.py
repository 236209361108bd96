"""Two workers: preempted, killed, resumed by the launcher, and gone on with on one machine."""

import re

import pytest

from tests import crashes
from tests.helpers import assert_close, cpus, run_python
from tests.multiworker import resume
from tests.multiworker.jobs import run_job

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def unbroken(folder):
    """Runs of two workers that nothing interrupts."""
    job = run_job("tests.multiworker.resume", folder / "job", shared=folder, worker=2)
    assert job.codes == [0, 0], job.report()
    return job


def test_rows_of_workers_without_a_seed(unbroken):
    """Different seeds of NumPy on each worker: still one order, and every row once."""
    first, second = unbroken.results("rows")
    assert sorted(first + second) == list(range(40))
    assert first != sorted(first)


@pytest.mark.parametrize("step, replicas", [(6, 1), (8, 3)])
def test_two_workers_to_one(unbroken, folder, capsys, step, replicas):
    """A checkpoint in mid-epoch, or of an epoch's last step, goes on on one machine, to 1e-5."""
    trainer = resume.compiled(devices=cpus(replicas))
    directory = folder / f"one-{step}-{replicas}"
    path = folder / "saved" / f"step-{step:08}"
    resumed = resume.fit(trainer, directory, resume=path)
    expected = unbroken.results("saved")[0]
    assert_close(resumed, expected, what="resumed")
    report = capsys.readouterr().err
    assert f"on 2 replica(s) of 2 worker(s) and goes on with {replicas} replica(s)" in report


@pytest.mark.parametrize(
    "fates", [["terminate"], pytest.param(["terminate", "kill"], marks=pytest.mark.slow)]
)
def test_sigterm_and_sigkill_under_the_launcher(unbroken, folder, fates):
    """Worker 0 or 1 gets SIGTERM in mid-epoch: both leave with 75; then one is killed; it goes on.

    The launcher starts the job again each time, and it ends in the bits of the unbroken one.
    """
    launched = folder / "-".join(["launched", *fates])
    done = run_python(
        *("-m", "keras_replicator", "launch", "--workers", "2", "--max-restarts", "1"),
        *("tests/crashes.py", str(launched), "--once", "--workers", "2"),
        *("--fates", *fates),
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    left = re.findall(r"start (\d), worker (\d) leaves with (\d+)", done.stdout)
    assert sorted(left)[:2] == [("0", "0", "75"), ("0", "1", "75")], done.stdout[-4000:]
    assert "preempted with its state saved: the job is started again" in done.stdout
    again = "the job is started again, 1 of at most 1 times"
    assert (again in done.stdout) == ("kill" in fates)
    ends = (launched / "ends.log").read_text().splitlines()
    assert [line.split()[2] for line in ends] == fates
    crashes.check(launched, folder / "unbroken")
