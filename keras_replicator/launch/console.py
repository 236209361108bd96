"""Where the lines of a job go: two streams, and a log file for each task."""

import contextlib
import os
import threading
from pathlib import Path
from typing import TextIO


class Console:
    """Writes whole lines of several processes, one after the other.

    Args:
        output: Where lines of standard output go.
        error: Where lines of standard error and the launcher's own go.
        log_dir: A directory, made when needed, for `worker_0.log` …; None keeps no logs.
    """

    def __init__(self, *, output: TextIO, error: TextIO, log_dir: str | os.PathLike | None = None):
        self.output = output
        self.error = error
        self._log_dir = None if log_dir is None else Path(log_dir)
        # Reentrant: a signal handler may speak while a line is being written.
        self._lock = threading.RLock()
        self._logged = set()
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)

    def open_log(self, name: str) -> TextIO | None:
        """Returns the log file of a task; emptied first, continued when the task starts again."""
        if self._log_dir is None:
            return None
        mode = "a" if name in self._logged else "w"
        self._logged.add(name)
        return open(self._log_dir / f"{name.replace(' ', '_')}.log", mode, encoding="utf-8")

    def write(self, line: str, *sinks: TextIO | None) -> None:
        """Writes a line to each sink, as far as it still takes any."""
        with self._lock:
            for sink in sinks:
                # When nobody listens any more the training goes on.
                with contextlib.suppress(OSError, ValueError):
                    if sink is not None:
                        sink.write(line)
                        sink.flush()

    def say(self, message: str) -> None:
        """Writes a line of the launcher's own."""
        self.write(f"[launch] {message}\n", self.error)
