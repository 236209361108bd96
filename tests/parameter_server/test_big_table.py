"""A table of 1,000,000 x 64 over 2 servers: a step moves rows, not the table."""

import pytest

from tests.multiworker.jobs import run_job
from tests.parameter_server.big_table import COLUMNS

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_bytes_follow_the_rows_that_are_used(tmp_path):
    job = run_job(
        "tests.parameter_server.big_table", tmp_path, chief=1, worker=2, ps=2, timeout=280
    )
    assert job.codes == [0] * 5, job.report()
    found = job.entries[0]
    for each in found.values():
        assert each["losses"][1] < each["losses"][0]
    small, large, other = (
        found[f"{rows} rows, batch {batch}"]["bytes"]
        for rows, batch in ((1_000_000, 1024), (1_000_000, 8192), (100_000, 8192))
    )
    rows = 8192 * COLUMNS * 4
    # Weights and slot come to the worker in lookup and update, and go back.
    assert rows < large < 12 * rows
    assert large < 0.1 * 1_000_000 * COLUMNS * 4
    # A tenth of the table: equal but for rows that a batch draws twice (4 %), and for what tasks
    # tell each other whatever a step does.
    assert other == pytest.approx(large, rel=0.3)
    assert 4 < large / small < 9
