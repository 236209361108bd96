"""Runs one script in several real processes of one TF_CONFIG cluster on 127.0.0.1.

>>> job = run_job("tests.multiworker.synchronous", tmp_path, worker=2)  # doctest: +SKIP
>>> job.codes, job.results("b01")  # doctest: +SKIP
([0, 0], [{'weights': ...}, {'weights': ...}])

The script is a module with `main(results, folder, *arguments)`, started by `start(main)`: `results`
is a dict-like object whose entries the test sees, also when the process fails later; `folder` is
shared by all processes.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers import REPOSITORY, child_environment


class Results:
    """Entries that are on disk as soon as they are set."""

    def __init__(self, path):
        self.path = Path(path)
        self.entries = {}

    def __setitem__(self, name, value):
        self.entries[name] = value
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.entries))
        unfinished.replace(self.path)


def start(main):
    """Runs `main` with the arguments of this process."""
    path, folder, *arguments = sys.argv[1:]
    main(Results(path), Path(folder), *arguments)


def task():
    """(type, index) of this process in TF_CONFIG."""
    described = json.loads(os.environ["TF_CONFIG"])["task"]
    return described["type"], described["index"]


@dataclasses.dataclass
class Job:
    """What the processes of a job left behind, in the order of TF_CONFIG.

    Attributes:
        codes: exit codes; None for a process that had to be killed at the time limit.
        outputs: what each printed.
        entries: the results of each.
    """

    codes: list
    outputs: list
    entries: list

    def results(self, name):
        """The entry `name` of every process; fails with the output of one that has none."""
        for number, (entries, output) in enumerate(zip(self.entries, self.outputs, strict=True)):
            assert name in entries, f"process {number} gave no {name}:\n{output[-4000:]}"
        return [entries[name] for entries in self.entries]

    def report(self):
        """All exit codes and the end of all outputs, for messages of asserts."""
        ends = [output[-3000:] for output in self.outputs]
        return "\n".join(f"[{code}]\n{end}" for code, end in zip(self.codes, ends, strict=True))


def free_ports(count):
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configurations(roles, addresses=None):
    """One TF_CONFIG for each process of `roles`, such as {"worker": 2, "ps": 1}."""
    count = sum(roles.values())
    addresses = iter(addresses or [f"127.0.0.1:{port}" for port in free_ports(count)])
    cluster = {role: [next(addresses) for _ in range(count)] for role, count in roles.items()}
    return [
        json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
        for role, count in roles.items()
        for index in range(count)
    ]


def run_job(
    module,
    folder,
    *arguments,
    shared=None,
    timeout=240,
    addresses=None,
    prefixes=(),
    absent=(),
    during=None,
    **roles,
):
    """Runs `python -m module` in one process per task and waits for all of them.

    Args:
        module: name of a module that calls `start`.
        folder: folder for logs and results of this job alone.
        arguments: further words for every process.
        shared: the folder that the processes share; `folder / "shared"` without one.
        timeout: seconds after which all that still run are killed.
        addresses: "host:port" of each process; free ports of 127.0.0.1 without them.
        prefixes: words in front of the command of each process.
        absent: numbers of processes that are not started; their exit code is None.
        during: function of the processes and the paths of their results, called meanwhile.
        roles: number of tasks of each type: `worker=2`.

    Returns:
        A `Job`.
    """
    shared = shared or folder / "shared"
    for path in (folder, shared):
        path.mkdir(parents=True, exist_ok=True)
    processes, logs, paths = [], [], []
    with contextlib.ExitStack() as stack:
        for number, configuration in enumerate(configurations(roles, addresses)):
            logs.append(folder / f"{number}.log")
            paths.append(folder / f"{number}.json")
            if number in absent:
                logs[-1].touch()
                processes.append(None)
                continue
            prefix = prefixes[number] if prefixes else ()
            command = [*prefix, sys.executable, "-m", module, paths[-1], shared, *arguments]
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=REPOSITORY,
                env=child_environment(TF_CONFIG=configuration),
                stdout=stack.enter_context(logs[-1].open("w")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            stack.callback(kill, process)
            processes.append(process)
        limit = time.monotonic() + timeout
        if during is not None:
            during(processes, paths)
        codes = [process and wait(process, limit - time.monotonic()) for process in processes]
    return Job(
        codes,
        [log.read_text(errors="replace") for log in logs],
        [json.loads(path.read_text()) if path.exists() else {} for path in paths],
    )


def end_with_parent():
    """Lets this process be killed when the tests are (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def wait(process, seconds):
    """The exit code, or None when the process still runs after `seconds`."""
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None


def kill(process):
    """Ends a process with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
