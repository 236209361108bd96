"""A cluster of workers and parameter servers inside of this process, for notebooks and tests.

    kr.simulate_cluster(workers=2, servers=1)
    trainer = kr.ReplicatedTrainer(build_model, strategy="parameter_server")

Every task is a TensorFlow server of its own in a thread of this process; what they say to each
other goes through the network of this machine, as between processes.
"""

import dataclasses

from keras_replicator import compat
from keras_replicator.checks import check_positive
from keras_replicator.cluster import Cluster
from keras_replicator.engines.serving import start_server
from keras_replicator.launch.resources import find_free_ports

_started = []  # (Cluster, servers): a process has one cluster at most


def simulate_cluster(workers=2, servers=1):
    """Starts workers and parameter servers in this process, to try them without other machines.

    Call it once, before anything starts TensorFlow. Trainers with `strategy="parameter_server"`
    then use this cluster. All share the cores of this machine.

    Args:
        workers: How many workers, at least 1.
        servers: How many parameter servers, at least 1.

    Raises:
        ValueError: When a number is below 1.
        RuntimeError: When TensorFlow has already started, or a cluster of another size has.

    Example:

    ```python
    import keras_replicator as kr

    kr.simulate_cluster(workers=2, servers=1)
    trainer = kr.ReplicatedTrainer(build_model, strategy="parameter_server")
    ```
    """
    check_positive("workers", workers)
    check_positive("servers", servers)
    if _started:
        found = _started[0][0]
        if (len(found.worker), len(found.ps)) == (workers, servers):
            return
        raise RuntimeError(
            "simulate_cluster: this process has a cluster already, and can have one only: "
            f"{found}. Received: workers={workers}, servers={servers}"
        )
    if compat.tensorflow_started():
        raise RuntimeError(
            "simulate_cluster came too late: TensorFlow has already started. Call "
            "kr.simulate_cluster at the top of the script, before any operation or model is made. "
            f"Received: workers={workers}, servers={servers}"
        )
    ports = [f"127.0.0.1:{port}" for port in find_free_ports(workers + servers + 1)]
    cluster = Cluster(
        task_type="chief",
        task_index=0,
        source="kr.simulate_cluster",
        chief=tuple(ports[:1]),
        worker=tuple(ports[1 : 1 + workers]),
        ps=tuple(ports[1 + workers :]),
    )
    held = [
        start_server(dataclasses.replace(cluster, task_type=role, task_index=index))
        for role in ("ps", "worker")
        for index in range(len(getattr(cluster, role)))
    ]
    _started.append((cluster, held))


def simulated_cluster():
    """Returns the `Cluster` that `simulate_cluster` has started, or None."""
    return _started[0][0] if _started else None
