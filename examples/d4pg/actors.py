"""The processes that act: started, started again when one dies, ended with the learner."""

import os
import pathlib
import subprocess
import sys

_SCRIPT = pathlib.Path(__file__).resolve().parent / "actor.py"
_TRIES = 3  # starts in a row without a single insert


class Actors:
    """A context in which actors run.

    Args:
        exchange: the `Exchange` that they are to reach.
        address: `(host, port)` of it.
        key: bytes.
        count: number of actors.
        seed: the actors' seeds are derived from it.

    Raises:
        RuntimeError: (from `revive`) when an actor ends again and again without an insert.
    """

    def __init__(self, exchange, address, key, count, seed=0):
        self._exchange = exchange
        self._address = f"{address[0]}:{address[1]}"
        self._environment = {
            **os.environ,
            "D4PG_KEY": key.hex(),
            # Small matrices: one thread an actor is fastest.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._seed = seed
        self._processes = [None] * count
        self._starts = [0] * count
        self._failures = [0] * count
        self._seen = [0] * count

    def __enter__(self):
        for number in range(len(self._processes)):
            self._start(number)
        return self

    def __exit__(self, *error):
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def revive(self):
        """Starts the actors again that have ended."""
        for number, process in enumerate(self._processes):
            code = process.poll()
            if code is None:
                continue
            seen = self._exchange.last_seen.get(number, 0)
            self._failures[number] = self._failures[number] + 1 if seen == self._seen[number] else 0
            if self._failures[number] >= _TRIES:
                raise RuntimeError(
                    f"Actor {number} ended {_TRIES} times without a single insert; its messages "
                    f"are above. Received: exit code {code}"
                )
            self._start(number)
            print(f"actor {number} ended with code {code}; started again", file=sys.stderr)

    def _start(self, number):
        # A new seed each time: what led to an end would else come again.
        seed = self._seed + 1000 * self._starts[number] + number + 1
        self._starts[number] += 1
        self._seen[number] = self._exchange.last_seen.get(number, 0)
        self._processes[number] = subprocess.Popen(
            [
                sys.executable,
                str(_SCRIPT),
                f"--address={self._address}",
                f"--number={number}",
                f"--seed={seed}",
            ],
            env=self._environment,
            stdin=subprocess.DEVNULL,
        )
        print(f"actor {number}: process {self._processes[number].pid}", file=sys.stderr)
