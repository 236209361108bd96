"""Which cluster this process belongs to: the readers, asked in order."""

import os
from collections.abc import Mapping

from keras_replicator.cluster import cloud_tpu, kubernetes, open_mpi, slurm, tf_config
from keras_replicator.cluster.cluster import Cluster, ClusterError

# In order. What says most comes first: TF_CONFIG is meant for TensorFlow, and mpirun inside of an
# allocation leaves the variables of its own srun behind.
READERS = (
    ("TF_CONFIG", tf_config),
    ("Cloud TPU", cloud_tpu),
    ("Open MPI", open_mpi),
    ("Slurm", slurm),
    ("Kubernetes", kubernetes),
)


def detect_cluster(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """Returns the cluster that the environment describes, or None on a single machine.

    TF_CONFIG comes first, then Cloud TPU, Open MPI, Slurm and Kubernetes. A TF_CONFIG of one task
    is a cluster of one worker; the others tell of clusters only when they have several.

    Example:

    >>> config = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> detect_cluster({"TF_CONFIG": config}).num_workers
    2
    >>> detect_cluster({}) is None
    True

    Args:
        environ: The environment to read; by default this process's.

    Raises:
        ClusterError: when the environment describes a job halfway, or contradicts itself.
            Going on in silence would train as many separate models as there are processes.
    """
    environ = os.environ if environ is None else environ
    for _, reader in READERS:
        cluster = reader.read(environ)
        if cluster is not None:
            return cluster
    return None


def explain_cluster(environ: Mapping[str, str] | None = None) -> str:
    """Returns what was detected and why, in a few lines for people.

    Example:

    >>> print(explain_cluster({}))
    a single machine: nothing in the environment tells of a cluster
      looked for: TF_CONFIG, Cloud TPU, Open MPI, Slurm, Kubernetes

    Args:
        environ: The environment to read; by default this process's.

    Raises:
        ClusterError: as `detect_cluster`.
    """
    environ = os.environ if environ is None else environ
    cluster = detect_cluster(environ)
    seen = {name: _quote_seen(environ, reader.VARIABLES) for name, reader in READERS}
    if cluster is not None:
        lines = [str(cluster)]
        for role, addresses in cluster.tasks.items():
            lines += [f"  {role} {i}: {address}" for i, address in enumerate(addresses)]
    elif any(seen.values()):
        lines = ["a single machine: the environment tells of one process only"]
    else:
        lines = [
            "a single machine: nothing in the environment tells of a cluster",
            f"  looked for: {', '.join(seen)}",
        ]
    lines += [f"  read, {name}: {values}" for name, values in seen.items() if values]
    return "\n".join(lines)


def _quote_seen(environ, variables):
    return ", ".join(f"{name}={environ[name]!r}" for name in variables if environ.get(name))


def check_expected_workers(cluster: Cluster | None, expected: int | None) -> None:
    """Raises an error unless the job has the expected number of workers.

    Args:
        cluster: What `detect_cluster` returned; None counts as one worker.
        expected: The number of workers, the chief among them; None accepts any.

    Raises:
        ClusterError: when the job has another number of workers.
        ValueError: when `expected` is no positive integer.
    """
    if expected is None:
        return
    if isinstance(expected, bool) or not isinstance(expected, int) or expected < 1:
        raise ValueError(
            "The argument `expected_workers` must be a positive integer, or None to accept any "
            f"number. Received: expected_workers={expected!r}"
        )
    found = 1 if cluster is None else cluster.num_workers
    if found == expected:
        return
    source = "no cluster was found in the environment" if cluster is None else str(cluster)
    raise ClusterError(
        f"This job has {found} worker{'' if found == 1 else 's'}, but {expected} "
        f"{'was' if expected == 1 else 'were'} expected ({source}). Received: "
        f"expected_workers={expected}. Start the job with {expected}, or pass "
        f"expected_workers={found}; `keras-replicator env` prints what was detected and why."
    )
