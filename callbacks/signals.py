"""Signals that announce the end of a process, seen at once and followed by a deadline.

Python runs a signal's handler between two steps of the main thread, which may be inside TensorFlow
for long. The deadline therefore counts in a thread of its own, which the operating system wakes.
"""

import os
import signal
import threading

_open = []  # in the order in which they were made; they may be closed in any order


class Announced:
    """Calls a function when a signal comes, and another one when too much time has passed since.

    Args:
        numbers: The signals.
        on_signal: Called once in the main thread.
        grace: Seconds between the first signal and the deadline, or None for no deadline.
        on_deadline: Called in another thread.
    """

    def __init__(self, numbers, on_signal, grace, on_deadline):
        self._on_signal = on_signal
        self._grace = grace
        self._on_deadline = on_deadline
        self._numbers = set(numbers)
        self._timer = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._handle) for number in self._numbers}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        _open.append(self)

    def start_deadline(self):
        """Begins to count, once, also where another process got the signal."""
        if self._timer is None and self._grace is not None:
            self._timer = threading.Timer(self._grace, self._on_deadline)
            self._timer.daemon = True
            self._timer.start()

    def close(self):
        """Gives the signals back to whoever handled them before."""
        later = _open[_open.index(self) + 1 :]
        _open.remove(self)
        for number, handler in self._handlers.items():
            heir = next((other for other in later if number in other._handlers), None)
            if heir is None:
                signal.signal(number, handler)
            else:
                heir._handlers[number] = handler
        self._handlers = {}
        if later:
            later[0]._before = self._before
        else:
            signal.set_wakeup_fd(self._before)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)
        if self._timer is not None:
            self._timer.cancel()

    def _handle(self, number, frame):
        del number, frame
        self._on_signal()

    def _watch(self):
        while numbers := os.read(self._reader, 64):
            if self._before >= 0:
                os.write(self._before, numbers)
            if self._numbers.intersection(numbers):
                self.start_deadline()
