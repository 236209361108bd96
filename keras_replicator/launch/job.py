"""Which processes a job on one machine has, and what each of them is told."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

from keras_replicator.cluster import Cluster
from keras_replicator.launch.resources import share_out

SIMULATED_DEVICES = "KERAS_REPLICATOR_SIMULATED_DEVICES"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One process of a job.

    Args:
        role: "worker", "ps" or "chief".
        index: Its position among the tasks of that role.
        environ: What its environment has beyond that of the launcher.
        cores: The CPU cores that it may use; empty for all.
    """

    role: str
    index: int
    environ: Mapping[str, str]
    cores: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name in messages: "worker 1"; "chief" for the only one."""
        return self.role if self.role == "chief" else f"{self.role} {self.index}"


def make_tasks(
    *,
    workers: int,
    ports: Sequence[int],
    parameter_servers: int = 0,
    devices_per_worker: int | None = None,
    cores: Sequence[int] = (),
    gpus: Sequence[str] = (),
) -> list[Task]:
    """Returns the processes of a job, in the order in which they start.

    A single worker gets no TF_CONFIG: it is no cluster. With parameter servers there is a chief
    beside the workers, which coordinates them. Cores are shared out where each worker can have one,
    and GPUs always.

    Example:

    >>> tasks = make_tasks(workers=2, ports=[10001, 10002])
    >>> tasks[1].name, tasks[1].environ["TF_CONFIG"][:54]
    ('worker 1', '{"cluster": {"worker": ["127.0.0.1:10001", "127.0.0.1:')

    Args:
        workers: The number of workers.
        ports: A port for each process; see `count_ports`.
        parameter_servers: The number of parameter servers.
        devices_per_worker: Logical CPU devices of each worker; None leaves its devices as they are.
        cores: The CPU cores of this machine.
        gpus: The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ValueError: when there are GPUs, but too few for a worker each.
    """
    roles = ["ps"] * parameter_servers + ["worker"] * workers
    if parameter_servers:
        roles.append("chief")
    addresses = {role: [] for role in roles}
    for role, port in zip(roles, ports, strict=True) if len(roles) > 1 else ():
        addresses[role].append(f"127.0.0.1:{port}")
    shares = _share_gpus(gpus, workers, devices_per_worker)
    core_shares = (share_out(cores, workers) if len(roles) > 1 else None) or [()] * workers

    tasks, counts = [], dict.fromkeys(roles, 0)
    for role in roles:
        index, environ = counts[role], {}
        counts[role] += 1
        if len(roles) > 1:
            cluster = Cluster(
                task_type=role,
                task_index=index,
                source="keras-replicator launch",
                **{name: tuple(found) for name, found in addresses.items()},
            )
            environ["TF_CONFIG"] = json.dumps(cluster.to_tf_config())
        if role == "worker" and devices_per_worker is not None:
            environ[SIMULATED_DEVICES] = str(devices_per_worker)
        if shares is not None:
            # Servers and coordinators compute nothing: they would only hold memory.
            environ["CUDA_VISIBLE_DEVICES"] = shares[index] if role == "worker" else ""
        own_cores = tuple(core_shares[index]) if role == "worker" else ()
        tasks.append(Task(role=role, index=index, environ=environ, cores=own_cores))
    return tasks


def count_ports(workers: int, parameter_servers: int) -> int:
    """Returns how many ports `make_tasks` wants: one a process, none for a single worker."""
    if parameter_servers:
        return workers + parameter_servers + 1
    return workers if workers > 1 else 0


def _share_gpus(gpus, workers, devices_per_worker):
    """Returns CUDA_VISIBLE_DEVICES of each worker, or None to leave it as it is."""
    if not gpus or (workers == 1 and devices_per_worker is None):
        return None
    if devices_per_worker is not None:
        return [""] * workers
    shares = share_out(gpus, workers)
    if shares is None:
        raise ValueError(
            f"This machine has {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}, too few for a "
            f"worker each. Received: --workers {workers}. Start at most {len(gpus)}, or hide the "
            "GPUs and train on CPUs: CUDA_VISIBLE_DEVICES= keras-replicator launch …"
        )
    return [",".join(share) for share in shares]
