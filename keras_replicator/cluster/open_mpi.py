"""Open MPI: the tasks of `mpirun`, which says how many there are, but not where."""

import zlib
from collections import Counter
from collections.abc import Mapping

from keras_replicator.cluster.cluster import Cluster, ClusterError
from keras_replicator.cluster.variables import check_port, quote, read_base_port, read_int, require

VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
HOSTS = "KERAS_REPLICATOR_HOSTS"


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the job that `mpirun` started; None for one task, or without `mpirun`.

    All tasks on one machine need nothing more. For several machines KERAS_REPLICATOR_HOSTS lists
    the host, or "host:port", of each rank in order: "n1,n1,n2,n2" for two tasks on each of two.
    """
    if not any(environ.get(name) for name in VARIABLES):
        return None
    require(
        environ,
        VARIABLES,
        "This process looks like a task of Open MPI's mpirun",
        "Start the job with mpirun, or unset all of them for a single machine.",
    )
    rank, size, local_rank, local_size = (
        read_int(environ, name, minimum=int(name.endswith("SIZE"))) for name in VARIABLES
    )
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise ClusterError(
            "The ranks and sizes that Open MPI gave contradict each other. "
            f"{quote(environ, VARIABLES)} Start the job with mpirun, or unset all of them for a "
            "single machine."
        )
    if size == 1:
        return None
    if environ.get(HOSTS):
        hosts, source = environ[HOSTS].split(","), HOSTS
    elif size == local_size:
        hosts, source = ["localhost"] * size, "OMPI_COMM_WORLD_SIZE"
    else:
        raise ClusterError(
            f"mpirun started {size} tasks, {local_size} of them on this machine, and does not say "
            f"where the others are. {quote(environ, [*VARIABLES, HOSTS])} Set {HOSTS} to the host "
            f"of each rank in order: mpirun -x {HOSTS}=host1,host2 …"
        )
    hosts = [host.strip() for host in hosts]
    _check_hosts(environ, hosts, rank, size, local_rank)
    addresses = _place_on_ports(environ, hosts)
    return Cluster(worker=addresses, task_type="worker", task_index=rank, source=source)


def _check_hosts(environ, hosts, rank, size, local_rank):
    if len(hosts) != size or not all(hosts):
        raise ClusterError(
            f"{HOSTS} must list one host for each of the {size} ranks. "
            f"{quote(environ, [HOSTS, *VARIABLES])} Repeat a host that runs several ranks: "
            f"{HOSTS}=host1,host1,host2,host2"
        )
    names = [_split_port(host)[0] for host in hosts]
    if names[:rank].count(names[rank]) != local_rank:
        raise ClusterError(
            f"{HOSTS} places rank {rank} on {names[rank]} as number "
            f"{names[:rank].count(names[rank])} there, but mpirun as number {local_rank}. "
            f"{quote(environ, [HOSTS, *VARIABLES])} List the hosts by rank; "
            "mpirun --map-by slot fills one host after the other."
        )


def _split_port(host):
    name, _, port = host.rpartition(":")
    return (name, int(port)) if name and port.isdecimal() else (host, None)


def _place_on_ports(environ, hosts):
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun"
    base = read_base_port(environ, zlib.crc32(job.encode()))
    used, addresses = Counter(), []
    for host in hosts:
        name, port = _split_port(host)
        if port is None:
            port = base + used[name]
            used[name] += 1
        addresses.append(f"{name}:{check_port(environ, port)}")
    return tuple(addresses)
