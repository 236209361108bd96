"""Runs that are killed 20 times at random moments end in the bits of the unbroken one."""

import pytest

from tests.helpers import run_python

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "options",
    [
        ["--data", "arrays"],
        ["--data", "tf.data"],
        ["--devices", "4", "--data", "arrays"],
        ["--devices", "4", "--data", "tf.data"],
        ["--workers", "2", "--data", "arrays"],
        ["--workers", "2", "--data", "tf.data"],
    ],
    ids=" ".join,
)
def test_killed_twenty_times(tmp_path, options):
    """Shuffling, dropout, momentum, EarlyStopping, a partial last batch; every row used once."""
    done = run_python("-m", "tests.crashes", str(tmp_path), "--kills", "20", *options, timeout=1100)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "killed 20 times" in done.stdout, done.stdout[-4000:]
