"""A worker is lost: every survivor ends in time, with an error that names it and nobody else."""

import contextlib
import os
import re
import signal
import time

import pytest

from tests.multiworker.jobs import run_job
from tests.multiworker.networks import namespaces

pytestmark = pytest.mark.multiprocess

PEER_TIMEOUT = 20
START_TIMEOUT = 12
# (what happens, to which worker, of how many) that `make test` runs.
SAMPLE = {("kill", 0, 3), ("cut", 1, 3)}


def cases():
    """Everything that can happen, to the chief and to another worker, of two and of three."""
    for way in ("kill", "stop", "cut", "never"):
        for workers in (2, 3):
            for lost in (0, workers - 1 if way == "never" else 1):
                case = (way, lost, workers)
                marks = () if case in SAMPLE else pytest.mark.slow
                yield pytest.param(*case, id=f"{way}-{lost}-of-{workers}", marks=marks)


@pytest.mark.parametrize("way, lost, workers", list(cases()))
def test_lost_worker_is_named(tmp_path, way, lost, workers):
    acted = []

    def strike(processes, paths):
        limit = time.monotonic() + 120
        while not all(path.exists() for path in paths) and time.monotonic() < limit:
            time.sleep(0.05)
        acted.append(time.time())
        if way == "cut":
            cut(lost)
        else:
            number = signal.SIGKILL if way == "kill" else signal.SIGSTOP
            os.kill(processes[lost].pid, number)
            if way == "stop":
                for process in [p for n, p in enumerate(processes) if n != lost]:
                    process.wait(120)
                processes[lost].kill()

    options = {"timeout": 200, "worker": workers}
    arguments = ("tests.multiworker.losses", tmp_path, PEER_TIMEOUT, START_TIMEOUT)
    if way == "never":
        started = time.time()
        job = run_job(*arguments, absent=(lost,), **options)
        acted.append(started)
    elif way == "cut":
        with contextlib.ExitStack() as stack:
            try:
                addresses, prefixes, cut = stack.enter_context(namespaces(workers))
            except OSError as error:
                pytest.skip(f"no network namespaces here: {error}")
            options |= {"addresses": addresses, "prefixes": prefixes, "during": strike}
            job = run_job(*arguments, **options)
    else:
        job = run_job(*arguments, during=strike, **options)

    name = f"worker {lost}" + (" (the chief)" if lost == 0 else "")
    for worker, entries in enumerate(job.entries):
        if worker == lost and way != "cut":
            continue
        assert "error" in entries, job.report()
        assert entries["kind"] == "WorkerLostError", job.report()
        assert job.codes[worker] not in (0, None), job.report()
        # Seen with `pytest -s`.
        print(f"worker {worker} after {entries['at'] - acted[0]:.1f} s: {entries['error']}")
        if worker != lost:
            assert blamed(entries["error"]) == name, job.report()
            assert f"This is worker {worker}." in entries["error"]
        if way != "never":
            assert entries["at"] - acted[0] < PEER_TIMEOUT
    if way == "cut" and workers > 2:
        assert f"this worker, {lost}, was cut off" in job.entries[lost]["error"], job.report()
    if way == "never":
        assert all(entries.get("at", 0) - acted[0] < START_TIMEOUT + 30 for entries in job.entries)


def blamed(message):
    """Whom the message names as lost, or missing."""
    found = re.search(r"Lost (.*?) of the|Missing: (.*?)\. This", message)
    return found and (found[1] or found[2])
