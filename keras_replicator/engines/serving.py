"""What workers and parameter servers do in a job with a chief: serve until the chief ends.

    serve(cluster, start_timeout=600)      # never returns: the process ends with the chief

One script runs in every process. What stands before the trainer runs everywhere; the trainer takes
the workers and servers out of the script, and the chief goes on.
"""

import os
import signal
import sys
import threading
import time

import tensorflow as tf

from keras_replicator import workers
from keras_replicator.arrivals import listens

# Seconds that a connection may take.
_PATIENCE = 5.0
# How often, and how often in a row, the chief must not answer until it counts as ended.
_INTERVAL = 0.5
_MISSES = 3
_THREADS = 8
# A chief that was told to end has so long to save its state.
_GRACE = 30.0


def serve(cluster, start_timeout):
    """Serves as the worker or parameter server that this process is, until the chief ends.

    Args:
        cluster: The `Cluster` of the job.
        start_timeout: Seconds until a chief that never came is an error.

    Raises:
        SystemExit: With code 0, when the chief has ended.
        WorkerLostError: When the chief did not come in time.
    """
    server = start_server(cluster)
    told = _note_signals()
    chief, begun, seen, misses = cluster.chief[0], time.monotonic(), False, 0
    while misses < (_MISSES if seen else 1):
        time.sleep(_INTERVAL)
        if is_up(chief):
            seen, misses = True, 0
        elif seen or told:
            misses += 1
        elif time.monotonic() - begun > start_timeout:
            raise workers.WorkerLostError(
                f"The chief of this job, {chief}, did not arrive within "
                f"start_timeout={start_timeout} seconds. This is {cluster}. Check that it was "
                "started and that its address can be reached."
            )
        if told and time.monotonic() - told[0] > _GRACE:
            break
    del server
    _leave()


def start_server(cluster):
    """Starts TensorFlow's server of one task.

    Args:
        cluster: The `Cluster`; its task says which.
    """
    # A function that waits for another task holds a thread. With one thread for each core, a worker
    # that is pinned to one core would wait for itself.
    others = sum(len(found) for found in cluster.tasks.values())
    threads = max(os.cpu_count() or 1, _THREADS, others + 1)
    tasks = tf.train.ClusterSpec({role: list(found) for role, found in cluster.tasks.items()})
    return tf.distribute.Server(
        tasks,
        job_name=cluster.task_type,
        task_index=cluster.task_index,
        protocol="grpc",
        config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
    )


def wait_for(cluster, start_timeout):
    """Waits until every worker and server answers.

    Args:
        cluster: The `Cluster`.
        start_timeout: Seconds to wait.

    Raises:
        WorkerLostError: When some do not; the message names them.
    """
    limit = time.monotonic() + start_timeout
    missing = [
        (f"{'worker' if role == 'worker' else 'parameter server'} {index} ({address})", address)
        for role in ("worker", "ps")
        for index, address in enumerate(getattr(cluster, role))
    ]
    while missing := [entry for entry in missing if not is_up(entry[1])]:
        if time.monotonic() > limit:
            raise workers.WorkerLostError(
                f"Not all tasks of this job arrived within start_timeout={start_timeout} seconds. "
                f"Missing: {', '.join(name for name, _ in missing)}. Check that each was started "
                "and that the addresses can be reached."
            )
        time.sleep(0.1)


def is_up(address):
    """Whether something listens at "host:port"."""
    return listens(address, _PATIENCE)


def _note_signals():
    """A signal to end is for the chief, which saves first; here it is only noted."""
    told = []
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(time.monotonic()))
    return told


def _leave():
    """Ends the process: TensorFlow's server cannot be stopped, and must not be taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
