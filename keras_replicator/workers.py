"""The workers of a job: what they must agree on, and errors that name the one that was lost."""

import json
import re

import tensorflow as tf

from keras_replicator import compat


class WorkerLostError(RuntimeError):
    """A worker of the job has ended, hangs, or cannot be reached."""


class WorkersDisagreeError(ValueError):
    """The workers of a job were started with different settings."""


_TASK = re.compile(r"/job:(\w+)/(?:replica:\d+/)?task:(\d+)")
# What TensorFlow raises when a peer is gone.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)


def lost(error, cluster, worker):
    """Returns a `WorkerLostError` that says which worker was lost.

    Args:
        error: TensorFlow's error.
        cluster: The `Cluster` of the job.
        worker: Number of this worker, which is never blamed.
    """
    names = sorted(
        {
            number
            for role, index in _TASK.findall(str(error))
            if (number := _worker_number(cluster, role, int(index))) not in (None, worker)
        }
    )
    if not names and worker != 0:
        names = [0]  # errors of the coordination service itself name no task: the chief leads it
    if not names and cluster.num_workers == 2:
        names = [1 - worker]
    who = ", ".join(f"worker {name}" + (" (the chief)" if name == 0 else "") for name in names)
    return WorkerLostError(
        f"Lost {who or 'a worker'} of the {cluster.num_workers} workers of this job: its process "
        "has ended, hangs, or cannot be reached. Start the job again; with "
        "fit(resume=directory) or BackupAndRestore it goes on from the last checkpoint. "
        f"This is worker {worker}. TensorFlow says: {_first_line(error)}"
    )


def _worker_number(cluster, role, index):
    if role == "chief":
        return 0
    if role != "worker":
        return None
    return index + len(cluster.chief)


def _first_line(error):
    return str(error).strip().splitlines()[0][:300]


def missing(error, cluster, start_timeout):
    """Returns the error of a job whose workers did not all arrive."""
    found = sorted(
        {
            number
            for role, index in _TASK.findall(str(error))
            if (number := _worker_number(cluster, role, int(index))) is not None
        }
        - {cluster.worker_index}
    )
    named = f" Missing: {', '.join(f'worker {n}' for n in found)}." if found else ""
    return WorkerLostError(
        f"Not all {cluster.num_workers} workers of this job arrived within "
        f"start_timeout={start_timeout} seconds.{named} This is worker {cluster.worker_index}; "
        f"expected: {', '.join(cluster.worker_addresses)}. Check that every worker was started and "
        f"that the addresses can be reached. TensorFlow says: {_first_line(error)}"
    )


_rounds = {}


def check_agreement(topic, facts, plan, timeout):
    """Compares facts over workers, and names the first difference instead of hanging later.

    Args:
        topic: What is compared, such as "fit".
        facts: Dict of JSON values of this worker.
        plan: The `Plan`.
        timeout: Seconds to wait for the other workers.

    Raises:
        WorkersDisagreeError: When a fact differs.
    """
    if plan.num_workers == 1:
        return
    number = _rounds[topic] = _rounds.get(topic, -1) + 1
    key = f"keras_replicator/{topic}/{number}"
    compat.set_shared_value(f"{key}/{plan.worker}", json.dumps(facts))
    for worker in range(plan.num_workers):
        if worker == plan.worker:
            continue
        try:
            theirs = json.loads(compat.get_shared_value(f"{key}/{worker}", timeout))
        except tf.errors.OpError as error:
            raise WorkerLostError(
                f"Worker {worker} did not reach `{topic}` within {timeout} seconds. Every worker "
                "must run the same script. This is "
                f"worker {plan.worker}. TensorFlow says: {_first_line(error)}"
            ) from error
        for name, value in facts.items():
            if theirs.get(name) != value:
                raise WorkersDisagreeError(
                    f"The workers of this job differ in {name}: worker {plan.worker} has "
                    f"{value!r}, worker {worker} has {theirs.get(name)!r}. Every worker must run "
                    "the same script with the same settings."
                )
