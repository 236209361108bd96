"""The workers of a job: what they must agree on, and errors that name the one that was lost."""

import itertools
import json
import os
import random
import re
import time
import zlib

import keras
import numpy as np
import tensorflow as tf

from keras_replicator import compat
from keras_replicator.version import __version__


class WorkerLostError(RuntimeError):
    """A worker of the job has ended, hangs, or cannot be reached."""


class ParameterServerLostError(WorkerLostError):
    """A parameter server of the job has ended or cannot be reached; its variables are gone."""


class WorkersDisagreeError(ValueError):
    """The workers of a job were started with different settings."""


_SERVER = re.compile(r"/job:ps/(?:replica:\d+/)?task:(\d+)")
# What TensorFlow raises when a peer is gone.
LOST = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
)


def task_names(cluster):
    """Returns TensorFlow's names of the tasks that train, by worker number.

    Args:
        cluster: A `Cluster`.
    """
    names = [
        f"/job:{role}/replica:0/task:{index}"
        for role in ("chief", "worker")
        for index in range(len(getattr(cluster, role)))
    ]
    return dict(enumerate(names))


def lost(error, cluster, watch):
    """Returns a `WorkerLostError` that says which worker was lost, or None when all are there.

    Args:
        error: TensorFlow's error.
        cluster: The `Cluster` of the job.
        watch: The `Watch` of this worker.
    """
    culprits, worker = watch.culprits(), watch.worker
    if not culprits:
        return None
    if len(culprits) == cluster.num_workers - 1 > 1:
        what = (
            f"Lost {_list(culprits)}, all at once: they have ended, or this worker, {worker}, was "
            "cut off from the network."
        )
    else:
        what = (
            f"Lost {_list(culprits)} of the {cluster.num_workers} workers of this job: its process "
            f"has ended, hangs, or cannot be reached. This is worker {worker}."
        )
    return WorkerLostError(
        f"{what} Start the job again; with fit(resume=directory) or BackupAndRestore it goes on "
        f"from the last checkpoint. TensorFlow says: {_first_line(error)}"
    )


def _list(numbers):
    return ", ".join(f"worker {n}" + (" (the chief)" if n == 0 else "") for n in numbers)


# Lines of TensorFlow's messages that say where something happened, not what.
_WHERE = ("Graph execution error", "Detected at node", "File ", "[[", "Additional GRPC")


def lost_server(error, cluster):
    """Returns a `ParameterServerLostError`, or None where the error names no server.

    Args:
        error: TensorFlow's error.
        cluster: The `Cluster` of the job.
    """
    found = sorted({int(index) for index in _SERVER.findall(str(error))})
    if not found:
        return None
    who = ", ".join(f"parameter server {index} ({cluster.ps[index]})" for index in found)
    return ParameterServerLostError(
        f"Lost {who} of this job, and the variables on it: its process has ended or cannot be "
        "reached. Start the job again; with fit(resume=directory) it goes on from the last "
        f"checkpoint (keras-replicator launch --max-restarts does). TensorFlow says: "
        f"{_first_line(error)}"
    )


def _first_line(error):
    """What TensorFlow says, without the names of tasks, which may mislead."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(_WHERE)] or [""]
    return re.sub(r"/job:\w+/\S*", "…", lines[0])[:300]


def missing(absent, cluster, start_timeout):
    """Returns the error of a job whose workers did not all arrive.

    Args:
        absent: Numbers of the workers that were never seen.
        cluster: The `Cluster` of the job.
        start_timeout: Seconds that were waited.
    """
    where = ", ".join(cluster.worker_addresses[number] for number in absent)
    return WorkerLostError(
        f"Not all {cluster.num_workers} workers of this job arrived within "
        f"start_timeout={start_timeout:g} seconds. Missing: {_list(absent)}. This is worker "
        f"{cluster.worker_index}. Check that every worker was started, and that {where} can be "
        "reached from here."
    )


def not_connected(error, cluster):
    """Returns the error of a job whose workers are all there, and do not come together."""
    return WorkerLostError(
        f"The {cluster.num_workers} workers of this job could not be connected. This is worker "
        f"{cluster.worker_index}; the workers: {', '.join(cluster.worker_addresses)}. TensorFlow "
        f"says: {_first_line(error)}"
    )


def start(engine, plan, seed):
    """Compares the workers before anything is made, and gives them a common seed.

    Args:
        engine: The engine.
        plan: The `Plan`.
        seed: The seed that the trainer was given, or None.

    Returns:
        The chief's `seed`. Where that is None, Python's, NumPy's, TensorFlow's and Keras' random
        numbers are the same on all workers from here on, as the chief's script (or chance) seeded
        them: what is shuffled or drawn without a seed is so alike.
    """
    if engine.num_workers == 1:
        return seed
    check_agreement(
        "the start",
        {
            "the version of keras_replicator": __version__,
            "the version of tensorflow": tf.__version__,
            "the version of keras": keras.__version__,
            "the kinds and number of devices": [name.partition(":")[0] for name in plan.devices],
        },
        engine,
    )
    given, drawn = compat.global_seed(), int.from_bytes(os.urandom(4), "big") // 2
    states = [zlib.crc32(repr(state).encode()) for state in (random.getstate(), _numpy_state())]
    everyone = exchange("the seeds", [seed, given, drawn, states], engine)
    seed, given, drawn, _ = everyone[0]
    seeded = [[theirs[1], theirs[3]] for theirs in everyone]
    if seed is None and (given is None or any(theirs != seeded[0] for theirs in seeded)):
        compat.set_random_seed(drawn if given is None else given)
    return seed


def _numpy_state():
    name, numbers, *rest = np.random.get_state()
    return name, numbers.tobytes(), rest


# Every exchange of a process has a number, which is the same on all workers.
_numbers = itertools.count()
# A worker that waits for another one looks in between whether that one is still there.
_WAIT_SECONDS = 2.0


def exchange(topic, facts, engine):
    """Returns the facts of every worker, in order; every worker must call it.

    Args:
        topic: What is told, such as "fit".
        facts: JSON values of this worker.
        engine: The engine.

    Raises:
        WorkerLostError: When a worker tells nothing within `start_timeout`, or is lost.
        WorkersDisagreeError: When another worker tells something else.
    """
    if engine.num_workers == 1:
        return [facts]
    key = f"keras_replicator/{next(_numbers)}"
    own = json.dumps([topic, facts])
    compat.set_shared_value(f"{key}/{engine.worker}", own)
    everyone = [
        json.loads(own if worker == engine.worker else _wait_for(worker, topic, key, engine))
        for worker in range(engine.num_workers)
    ]
    for worker, (theirs, _) in enumerate(everyone):
        if theirs != topic:
            raise WorkersDisagreeError(
                f"The workers of this job have come apart: worker {engine.worker}, this one, is at "
                f"`{topic}`, and worker {worker} at `{theirs}`. Every worker must run the same "
                "script: no call of the trainer under a condition on the worker, and none after "
                "an error that the others did not have."
            )
    return [facts for _, facts in everyone]


def _wait_for(worker, topic, key, engine):
    deadline = time.monotonic() + engine.start_timeout
    while True:
        try:
            return compat.get_shared_value(f"{key}/{worker}", _WAIT_SECONDS)
        except tf.errors.DeadlineExceededError as error:
            if engine.watch.lost:
                raise  # the engine names whom
            if time.monotonic() > deadline:
                raise WorkerLostError(
                    f"Worker {worker} did not reach `{topic}` within {engine.start_timeout} "
                    f"seconds. Every worker must run the same script. This is worker "
                    f"{engine.worker}. TensorFlow says: {_first_line(error)}"
                ) from error


def check_agreement(topic, facts, engine):
    """Compares facts over workers, and names the first difference instead of hanging later.

    Args:
        topic: What is compared, such as "fit".
        facts: Dict of JSON values of this worker.
        engine: The engine.

    Returns:
        The facts of every worker, in order.

    Raises:
        WorkersDisagreeError: When a fact differs.
    """
    everyone = exchange(topic, facts, engine)
    # Every worker compares with the chief, so that all give the same error.
    for worker, theirs in enumerate(everyone):
        for name in everyone[0]:
            if theirs.get(name) != everyone[0][name]:
                chief, other = _difference(everyone[0][name], theirs.get(name))
                raise WorkersDisagreeError(
                    f"The workers of this job differ in {name}: worker 0 (the chief) has {chief}, "
                    f"worker {worker} has {other}. Every worker must run the same script with the "
                    f"same settings. This is worker {engine.worker}."
                )
    return everyone


def _difference(first, second):
    """Texts of two values; of two lists, of the first entries that differ."""
    if not (isinstance(first, list) and isinstance(second, list)):
        return repr(first), repr(second)
    for number, (one, other) in enumerate(itertools.zip_longest(first, second)):
        if one != other:
            return tuple(
                "no more of them" if value is None else f"{value!r} as number {number}"
                for value in (one, other)
            )
    return repr(first), repr(second)
