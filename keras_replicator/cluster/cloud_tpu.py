"""Cloud TPU: recognised by the variables that its machines and Kubernetes pods carry."""

from collections.abc import Mapping

from keras_replicator.cluster.cluster import Cluster, ClusterError
from keras_replicator.cluster.variables import quote, read_int

VARIABLES = ("TPU_NAME", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns a cluster of kind "tpu"; None without TPU_NAME and TPU_WORKER_HOSTNAMES.

    With TPU_NAME one process drives the whole TPU, however many machines it has: one worker.
    Otherwise each of TPU_WORKER_HOSTNAMES is a worker, and TPU_WORKER_ID says which one this is.
    """
    if environ.get("TPU_NAME"):
        return _make_cluster((environ["TPU_NAME"],), 0, "TPU_NAME")
    hosts = tuple(
        host.strip() for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()
    )
    if not hosts:
        return None
    if len(hosts) == 1:
        return _make_cluster(hosts, 0, "TPU_WORKER_HOSTNAMES")
    if not environ.get("TPU_WORKER_ID"):
        raise ClusterError(
            f"TPU_WORKER_HOSTNAMES lists {len(hosts)} machines, but nothing says which one this "
            f"is. {quote(environ, VARIABLES)} Set TPU_WORKER_ID to its position, counted from 0, "
            "or TPU_NAME to the name of the TPU."
        )
    index = read_int(environ, "TPU_WORKER_ID")
    if index >= len(hosts):
        raise ClusterError(
            f"TPU_WORKER_ID is {index}, but TPU_WORKER_HOSTNAMES lists {len(hosts)} machines. "
            f"{quote(environ, VARIABLES)} Set TPU_WORKER_ID to a position in that list, from 0."
        )
    return _make_cluster(hosts, index, "TPU_WORKER_HOSTNAMES")


def _make_cluster(names, index, source):
    return Cluster(worker=names, task_type="worker", task_index=index, source=source, kind="tpu")
