"""`Cluster`: the tasks of a job, and which of them this process is."""

import dataclasses

ROLES = ("chief", "worker", "ps", "evaluator")


class ClusterError(ValueError):
    """The environment describes a job halfway, or contradicts itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The tasks of a job, their addresses, and which of them this process is.

    Workers are counted with the chief first. With parameter servers the chief coordinates and
    trains nothing itself, so it is not counted among the workers there.

    Example:

    >>> cluster = Cluster(
    ...     worker=("n1:2222", "n2:2222"), task_type="worker", task_index=1, source="TF_CONFIG"
    ... )
    >>> cluster.num_workers, cluster.worker_index, cluster.is_chief
    (2, 1, False)
    >>> print(cluster)
    2 workers, from TF_CONFIG; this is worker 1, n2:2222

    Args:
        task_type: The role of this process: "chief", "worker", "ps" or "evaluator".
        task_index: Its position among the tasks of that role.
        source: Where this was read, for people: "SLURM_STEP_NODELIST".
        chief: Addresses, "host:port", of the chief: one or none.
        worker: Addresses of the workers, in order.
        ps: Addresses of the parameter servers.
        evaluator: Addresses of the evaluators, which take no part in training.
        kind: "tpu" for a Cloud TPU, whose addresses are names without ports; else "hosts".
    """

    task_type: str
    task_index: int
    source: str
    chief: tuple[str, ...] = ()
    worker: tuple[str, ...] = ()
    ps: tuple[str, ...] = ()
    evaluator: tuple[str, ...] = ()
    kind: str = "hosts"

    @property
    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The addresses of each role that has any: `{"worker": ("n1:2222", "n2:2222")}`."""
        addresses = {role: getattr(self, role) for role in ROLES}
        return {role: found for role, found in addresses.items() if found}

    @property
    def address(self) -> str | None:
        """The address of this process; None for an evaluator that the cluster does not list."""
        addresses = getattr(self, self.task_type)
        return addresses[self.task_index] if self.task_index < len(addresses) else None

    @property
    def has_parameter_servers(self) -> bool:
        return bool(self.ps)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The addresses of the workers by worker index; the chief first where it trains."""
        return self.worker if self.has_parameter_servers else self.chief + self.worker

    @property
    def num_workers(self) -> int:
        return len(self.worker_addresses)

    @property
    def worker_index(self) -> int | None:
        """The number of this worker (the chief is 0); None for a process that does not train.

        These are parameter servers, evaluators, and the chief of a job with parameter servers.
        """
        if self.task_type == "worker":
            return self.task_index + len(self.worker_addresses) - len(self.worker)
        if self.task_type == "chief" and not self.has_parameter_servers:
            return 0
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this process writes shared files: the chief, or worker 0 where there is none."""
        if self.chief:
            return self.task_type == "chief"
        return self.task_type == "worker" and self.task_index == 0

    def to_tf_config(self) -> dict:
        """Returns the dict that `json.dumps` turns into the TF_CONFIG of this process."""
        return {
            "cluster": {role: list(addresses) for role, addresses in self.tasks.items()},
            "task": {"type": self.task_type, "index": self.task_index},
        }

    def __str__(self):
        counts = f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"
        if self.ps:
            counts += f" and {len(self.ps)} parameter server{'' if len(self.ps) == 1 else 's'}"
        if self.worker_index is None:
            name = (
                self.task_type
                if self.task_type == "chief"
                else f"{self.task_type} {self.task_index}"
            )
        else:
            name = f"worker {self.worker_index}" + (" (the chief)" if self.is_chief else "")
        address = f", {self.address}" if self.address else ""
        return f"{counts}, from {self.source}; this is {name}{address}"
