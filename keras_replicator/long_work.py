"""Work that takes long says what it is doing: tracing, restoring, skipping data.

    with announced("Tracing the train step"):
        ...

Nothing is said about work that is done within a few seconds.
"""

import contextlib
import sys
import threading
import time

_PATIENCE = 10.0


@contextlib.contextmanager
def announced(what, is_chief=True, patience=None):
    """Says on the standard error stream what goes on, when it goes on for some seconds.

    Args:
        what: The work, as the beginning of a sentence: "Tracing the train step".
        is_chief: Whether this worker speaks.
        patience: Seconds without a word; 10 by default.
    """
    patience = _PATIENCE if patience is None else patience
    started, said = time.monotonic(), threading.Event()

    def say():
        said.set()
        print(f"{what} goes on for more than {patience:g} s …", file=sys.stderr, flush=True)

    timer = threading.Timer(patience, say)
    timer.daemon = True
    if is_chief:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if said.is_set():
            print(f"{what} took {time.monotonic() - started:.0f} s.", file=sys.stderr, flush=True)
