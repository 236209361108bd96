"""The quick start: one process, `keras-replicator launch`, and two nodes of Slurm."""

import re
import sys

import pytest

from tests import slurm
from tests.helpers import REPOSITORY, child_environment, run_python

pytestmark = pytest.mark.multiprocess

SCRIPT = str(REPOSITORY / "examples" / "quickstart.py")
EPOCHS = 1


def last_line(output):
    """The line with accuracy and loss, to 4 digits."""
    found = re.findall(r"test accuracy: \d\.\d{4}  test loss: \d\.\d{4}", output)
    assert found, output[-4000:]
    assert len(set(found)) == 1, found
    return found[0]


def arguments(folder, epochs=EPOCHS):
    return SCRIPT, "--epochs", str(epochs), "--logdir", str(folder / "logs")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process prints."""
    done = run_python(*arguments(tmp_path_factory.mktemp("alone")), timeout=240)
    assert done.returncode == 0, done.stdout
    return last_line(done.stdout)


def launch(folder, epochs=EPOCHS):
    command = ("-m", "keras_replicator", "launch", "--workers", "2")
    return run_python(*command, *arguments(folder, epochs), timeout=290)


@pytest.mark.slow
def test_launched_workers_print_the_same_numbers(alone, tmp_path):
    done = launch(tmp_path)
    assert done.returncode == 0, done.stdout
    for worker in range(2):
        lines = re.findall(rf"^\[worker {worker}\] (.*)$", done.stdout, re.MULTILINE)
        assert last_line("\n".join(lines)) == alone
    assert "2 workers, from TF_CONFIG" in done.stdout
    assert "Sharding: each worker reads every batch" in done.stdout


@pytest.mark.slow
def test_launched_workers_train_to_the_end(tmp_path):
    """All epochs: at least 97 % of the test digits, on one process and on two workers."""
    done = run_python(*arguments(tmp_path, 15), timeout=240)
    assert done.returncode == 0, done.stdout
    expected = last_line(done.stdout)
    assert float(expected.split()[2]) >= 0.97
    assert last_line(launch(tmp_path, 15).stdout) == expected


@pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not()))
def test_two_nodes_of_slurm_print_the_same_numbers(alone, tmp_path):
    """examples/slurm/train.sbatch, in which srun starts a task on each of two nodes."""
    (tmp_path / "slurm").mkdir()
    log = tmp_path / "job.log"
    with slurm.cluster(tmp_path / "slurm") as run:
        submit = ["sbatch", "--wait", f"--output={log}", f"--chdir={REPOSITORY}"]
        batch = str(REPOSITORY / "examples" / "slurm" / "train.sbatch")
        environment = child_environment(PYTHON=sys.executable)
        done = run([*submit, batch, *arguments(tmp_path)], timeout=240, **environment)
    # srun cuts long lines, of a progress bar, anywhere: in the middle of a character, too.
    output = log.read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, done.stdout + output[-4000:]
    for task in range(2):
        lines = re.findall(rf"^{task}: (.*)$", output, re.MULTILINE)
        assert last_line("\n".join(lines)) == alone
    assert "2 workers, from SLURM_STEP_NODELIST" in output
