"""Runs a job on this machine, and starts it again when it fails.

```python
from keras_replicator.launch import launch

code = launch(["python", "train.py"], workers=2, max_restarts=3, log_dir="logs")
```
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from keras_replicator.launch.console import Console
from keras_replicator.launch.job import count_ports, make_tasks
from keras_replicator.launch.resources import find_cores, find_free_ports, find_gpus
from keras_replicator.launch.run import PREEMPTED, Run

# A script that always says that it was preempted must not go round for ever.
MAX_PREEMPTIONS = 32
# So long may the others notice by themselves that one was lost, and say so.
NOTICE_SECONDS = 5.0
GRACE_SECONDS = 30.0
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


def launch(
    command: Sequence[str],
    *,
    workers: int = 1,
    parameter_servers: int = 0,
    devices_per_worker: int | None = None,
    max_restarts: int = 0,
    log_dir: str | os.PathLike | None = None,
    notice_seconds: float = NOTICE_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    environ: Mapping[str, str] | None = None,
    output: TextIO | None = None,
    error: TextIO | None = None,
) -> int:
    """Runs a command as the processes of one job and returns the job's exit code.

    When one process fails, the others have `notice_seconds` to say what they see; then they get
    SIGTERM, and after `grace_seconds` SIGKILL. The whole job is then started again, up to
    `max_restarts` times; KERAS_REPLICATOR_RESTART counts the starts from 0. In a job with parameter
    servers a worker that fails is replaced alone, which counts as a restart; when none is left, the
    job goes on with the workers that it has.

    Processes that end with code 75 (`PREEMPTED`) were preempted and have saved their state: the job
    is started again without counting as failed, up to 32 times. SIGINT, SIGTERM and SIGHUP are
    passed on and end the job; all have `grace_seconds`, and a second signal kills them at once.

    Args:
        command: The program and its arguments, the same for every process.
        workers: The number of workers. A single one runs as it would without a launcher: no
            TF_CONFIG, no prefix.
        parameter_servers: The number of parameter servers; if any, a chief is started, too.
        devices_per_worker: Logical CPU devices of each worker; None leaves devices as they are.
        max_restarts: How often a job that failed is started again.
        log_dir: A directory for `worker_0.log` …; None keeps no logs.
        notice_seconds: The time between a failure and SIGTERM to the others.
        grace_seconds: The time between SIGTERM and SIGKILL.
        environ: The environment of the processes; by default this process's.
        output: Where their standard output goes; by default this process's.
        error: Where their standard error goes; by default this process's.

    Returns:
        0, or the code of the process that failed first: 128 + number where a signal ended it.

    Raises:
        ValueError: when there are GPUs, but too few for a worker each.
    """
    environ = dict(os.environ if environ is None else environ)
    console = Console(output=output or sys.stdout, error=error or sys.stderr, log_dir=log_dir)
    gpus = find_gpus(environ)
    failures = preemptions = 0
    with _caught_signals() as received:
        while True:
            tasks = make_tasks(
                workers=workers,
                parameter_servers=parameter_servers,
                devices_per_worker=devices_per_worker,
                ports=find_free_ports(count_ports(workers, parameter_servers)),
                cores=find_cores(),
                gpus=gpus,
            )
            run = Run(
                command,
                tasks,
                environ=environ,
                console=console,
                received=received,
                num_starts=failures + preemptions,
                max_replaced=max_restarts - failures,
                notice_seconds=notice_seconds,
                grace_seconds=grace_seconds,
            )
            code = run.wait()
            failures += run.num_replaced
            if code == 0 or received:
                return code
            if code == PREEMPTED and preemptions < MAX_PREEMPTIONS:
                preemptions += 1
                console.say("preempted with its state saved: the job is started again")
            elif code != PREEMPTED and failures < max_restarts:
                failures += 1
                console.say(f"the job is started again, {failures} of at most {max_restarts} times")
            else:
                return code


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[tuple[int, float]]]:
    """Yields a list that grows by (number, time) with each signal that would end this process."""
    received = []
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only.
        yield received
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    # `nohup` and its like ignore a signal on purpose.
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def note(number, _):
        received.append((number, time.monotonic()))

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
