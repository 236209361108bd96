"""How this process joins the other workers of its job, and who watches over them.

meet(cluster, start_timeout=600)
...                                   # TensorFlow's server starts
watch = watch_over(cluster, task_names(cluster), peer_timeout=60)
"""

from keras_replicator import compat, workers
from keras_replicator.arrivals import listens, wait_for_all
from keras_replicator.watch import Watch

_watches = []  # one of a process, as it has one server


def meet(cluster, start_timeout):
    """Waits for the other workers of a job.

    Args:
        cluster: The `Cluster`.
        start_timeout: Seconds to wait.

    Raises:
        RuntimeError: When this worker cannot listen at its address.
        WorkerLostError: When some do not come; it names them.
    """
    try:
        absent = wait_for_all(cluster.worker_addresses, cluster.worker_index, start_timeout)
    except OSError as error:
        raise RuntimeError(
            f"This worker cannot listen at its address {cluster.address}: {error}. End what uses "
            f"the port, or give the job other ones. Received: {cluster}"
        ) from error
    if absent:
        raise workers.missing(absent, cluster, start_timeout)


def watch_over(cluster, names, peer_timeout):
    """Returns the `Watch` of this process over the other workers, started.

    Args:
        cluster: The `Cluster`.
        names: TensorFlow's names of its tasks, by worker number.
        peer_timeout: Seconds until a lost worker is an error.
    """
    if _watches:
        return _watches[0]
    peers = dict(names)
    addresses = dict(zip(peers.values(), cluster.worker_addresses, strict=True))
    del peers[cluster.worker_index]

    def ask(task, seconds):
        answer = compat.peer_answers(task, seconds)
        # A channel that has to be opened anew answers for a while as if nobody were there.
        return None if answer is False and listens(addresses[task], seconds) else answer

    watch = Watch(
        peers=peers,
        worker=cluster.worker_index,
        timeout=peer_timeout,
        ask=ask,
        abort=compat.abort_collectives,
    )
    watch.start()
    _watches.append(watch)
    return watch
