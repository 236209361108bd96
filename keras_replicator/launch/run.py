"""One start of a job: its processes are watched until all have ended."""

import signal
import time
from collections.abc import Mapping, Sequence

from keras_replicator.launch.console import Console
from keras_replicator.launch.job import Task
from keras_replicator.launch.process import TaskProcess

# EX_TEMPFAIL of sysexits.h: the script was preempted, saved its state, and wants another start.
PREEMPTED = 75
RESTART = "KERAS_REPLICATOR_RESTART"

POLL_SECONDS = 0.05
# `timeout` and some schedulers send a signal to a process and again to its group.
SAME_SIGNAL_SECONDS = 1.0
NEVER = float("inf")


class Run:
    """One start of a job.

    Args:
        command: The program and its arguments, the same for every process.
        tasks: The processes.
        environ: What their environments have in common.
        console: Where their lines go.
        received: Signals that this process got, (number, time), to which a handler appends.
        num_starts: How many processes were started before in the place of each of these.
        max_replaced: How many workers may be replaced alone.
        notice_seconds: The time between a failure and SIGTERM to the others.
        grace_seconds: The time between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        tasks: Sequence[Task],
        *,
        environ: Mapping[str, str],
        console: Console,
        received: list[tuple[int, float]],
        num_starts: int,
        max_replaced: int,
        notice_seconds: float,
        grace_seconds: float,
    ):
        self.num_replaced = 0
        self._command = command
        self._tasks = tasks
        self._environ = environ
        self._console = console
        self._received = received
        self._num_starts = num_starts
        self._max_replaced = max_replaced
        self._notice_seconds = notice_seconds
        self._grace_seconds = grace_seconds

        self._code = 0
        self._is_done = False
        self._num_handled = 0
        self._terminate_at = self._kill_at = NEVER
        self._running = []
        self._ended = []

    def wait(self) -> int:
        """Starts the processes, waits for their end, and returns the first code that is not 0."""
        try:
            for task in self._tasks:
                self._start(task)
            while self._running:
                self._pass_signals_on()
                self._collect()
                self._end_in_time()
                time.sleep(POLL_SECONDS)
        finally:
            for process in self._running:
                process.kill()
            for process in self._running + self._ended:
                if self._code:
                    # What a failed process leaves behind holds ports and devices.
                    process.kill()
                process.close()
        return self._code

    def _start(self, task):
        start = str(self._num_starts + self.num_replaced)
        environ = {**self._environ, **task.environ, "PYTHONUNBUFFERED": "1", RESTART: start}
        prefix = f"[{task.name}] " if len(self._tasks) > 1 else ""
        self._running.append(
            TaskProcess(task, self._command, environ=environ, console=self._console, prefix=prefix)
        )

    def _pass_signals_on(self):
        for number, at in self._received[self._num_handled :]:
            self._num_handled += 1
            if self._num_handled == 1:
                self._console.say(f"{signal.Signals(number).name} is passed on to all processes")
                for process in self._running:
                    process.send_signal(number)
                self._kill_at = min(self._kill_at, at + self._grace_seconds)
            elif at - self._received[0][1] > SAME_SIGNAL_SECONDS:
                self._console.say("a second signal: all processes are killed")
                self._kill_at = at

    def _collect(self):
        for process in list(self._running):
            code = process.exit_code()
            if code is None:
                continue
            self._running.remove(process)
            self._ended.append(process)
            if code == 0:
                self._handle_success(process)
            elif self._can_be_replaced(process, code):
                self._replace(process, code)
            elif self._can_be_missed(process, code):
                self._console.say(
                    f"{process.task.name} ended with code {code}; the job goes on without it"
                )
            elif self._code == 0 and not self._is_done:
                self._handle_failure(process, code)

    def _handle_success(self, process):
        if self._code == 0 and self._has_servers and process.task.role == "chief":
            # Servers and the workers of a coordinator serve until they are ended.
            self._is_done = True
            self._end_after(self._notice_seconds)

    def _handle_failure(self, process, code):
        self._code = code
        if len(self._tasks) > 1:
            self._console.say(f"{process.task.name} ended with code {code}; the others are ended")
        # The others of a preempted job are saving. Those of a broken one wait for a peer in vain.
        self._end_after(self._grace_seconds if code == PREEMPTED else self._notice_seconds)

    def _can_be_replaced(self, process, code):
        return self._only_serves(process, code) and self.num_replaced < self._max_replaced

    def _can_be_missed(self, process, code):
        others = any(process.task.role == "worker" for process in self._running)
        return self._only_serves(process, code) and others

    def _only_serves(self, process, code):
        """Whether it is a worker that others can stand in for, in a job that is undisturbed."""
        is_undisturbed = self._code == 0 and not self._is_done and not self._received
        return (
            is_undisturbed
            and self._has_servers
            and process.task.role == "worker"
            and code != PREEMPTED
        )

    def _replace(self, process, code):
        process.kill()
        process.close()
        self.num_replaced += 1
        self._console.say(f"{process.task.name} ended with code {code} and is replaced")
        self._start(process.task)

    @property
    def _has_servers(self):
        return any(task.role == "ps" for task in self._tasks)

    def _end_after(self, seconds):
        self._terminate_at = min(self._terminate_at, time.monotonic() + seconds)

    def _end_in_time(self):
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_at = NEVER
            for process in self._running:
                process.kill()
        elif now >= self._terminate_at:
            self._terminate_at = NEVER
            self._kill_at = min(self._kill_at, now + self._grace_seconds)
            for process in self._running:
                process.send_signal(signal.SIGTERM)
