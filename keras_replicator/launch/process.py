"""One process of a job: how it starts, what it prints, how it ends."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from keras_replicator.launch.console import Console
from keras_replicator.launch.job import Task
from keras_replicator.launch.resources import pinned_to

# Something that a process left behind may hold its output open for ever.
OUTPUT_SECONDS = 5.0


class TaskProcess:
    """A running task, whose output is passed on line by line.

    It has a session of its own, so that Ctrl-C reaches it through the launcher only, and once.

    Args:
        task: What to run it as.
        command: The program and its arguments.
        environ: Its whole environment.
        console: Where its lines go.
        prefix: What each of its lines begins with there.
    """

    def __init__(
        self,
        task: Task,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        console: Console,
        prefix: str,
    ):
        self.task = task
        self._console = console
        self._prefix = prefix
        self._log = console.open_log(task.name)
        try:
            with pinned_to(task.cores):
                self._process = subprocess.Popen(
                    command,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Universal newlines: the carriage return of a progress bar ends a line, too.
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,
                )
        except OSError:
            self._close_log()
            raise
        streams = ((self._process.stdout, console.output), (self._process.stderr, console.error))
        self._readers = [
            threading.Thread(target=self._pass_on, args=stream, daemon=True) for stream in streams
        ]
        for reader in self._readers:
            reader.start()

    def exit_code(self) -> int | None:
        """Returns its code as a shell gives it, 128 + number after a signal; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of the process and for its last lines."""
        self._process.wait()
        for reader in self._readers:
            reader.join(OUTPUT_SECONDS)
        self._close_log()

    def _close_log(self):
        if self._log is not None:
            self._log.close()

    def _pass_on(self, pipe, sink):
        with pipe:
            for line in pipe:
                line = line if line.endswith("\n") else line + "\n"
                self._console.write(line, self._log)
                self._console.write(self._prefix + line, sink)
