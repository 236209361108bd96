"""Iterators that tf.data tunes are let go on a thread of their own.

The thread in which tf.data tunes a pipeline can miss that its iterator ends. Whoever lets the
iterator go then waits until that thread looks again: after 10 ms at first, twice as long each time,
a minute in the end (TensorFlow 2.21). Training does not wait for that.
"""

import threading

_last = None


def let_go(held):
    """Clears a list that holds the last reference to an iterator, on a thread of its own.

    Of several iterators one at most is still about to end when this returns, so that not more than
    one shuffle buffer outlives its epoch.

    Args:
        held: A list; empty in the end.
    """
    global _last
    if _last is not None:
        _last.join()
    _last = threading.Thread(target=held.clear, name="keras_replicator_let_go")
    _last.start()
