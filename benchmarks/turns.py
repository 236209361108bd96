"""Processes that live through a whole benchmark and take turns.

    process = Process("benchmarks.mesh", ["--contender", "ours"], {}, log)
    turn([process])          # the seconds of one turn
    process.end()

Such a process runs `serve(train)`: one call of `train` for each line that it is sent.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A process that trains when it is told to.

    Args:
        module: Name of the module that it runs.
        words: Words of its command line.
        environ: Dict of more environment variables; None as a value takes one away.
        log: File for its error output.
    """

    def __init__(self, module, words, environ, log):
        merged = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", **os.environ}
        merged.update(environ)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=ROOT,
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def begin(self):
        """Tells it to train for one turn."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `seconds` will say
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def seconds(self):
        """Waits for the end of the turn and returns how long it took.

        Raises:
            RuntimeError: When the process has ended instead.
        """
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError(f"A process ended with code {self._process.wait()}; see its log")

    def end(self):
        """Ends it."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


def turn(processes):
    """Lets processes train at the same time; returns the seconds of the slowest."""
    for process in processes:
        process.begin()
    return max(process.seconds() for process in processes)


def serve(train):
    """Calls `train` with every line of the input, and says how long it took.

    Args:
        train: Function that trains for one turn. It may return the seconds that count.
    """
    for _ in sys.stdin:
        begun = time.perf_counter()
        seconds = train()
        print("seconds", seconds or time.perf_counter() - begun, flush=True)
