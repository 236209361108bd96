"""What runs where, and why: a pure decision from hardware, cluster and request.

plan = make_plan(detect_hardware(), cluster, strategy="auto", devices=None)
print(plan)
"""

import dataclasses

from keras_replicator import footprint

STRATEGIES = ("auto", "one_device", "mirrored", "multi_worker", "parameter_server", "tpu", "mesh")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a job uses its hardware. Immutable; `print(plan)` gives a table.

    Attributes:
        strategy: "one_device", "mirrored", "multi_worker", "parameter_server", "tpu", "mesh" or
            "custom".
        devices: Names of this worker's devices, one per replica.
        num_replicas: Replicas of the whole job.
        num_workers: Processes of the job that train.
        worker: Number of this process; worker 0 is the chief.
        num_servers: Parameter servers; the chief then coordinates the workers beside it.
        reasons: Pairs (field, why).
        details: Pairs (topic, text) about batches, losses, clipping, precision, files.
        profile: The `scaling.Profile` that `trainer.measure` found, or None.
        groups: Names of the logical devices of each replica, where it has several.
        memory: Under a mesh, pairs (what, bytes on each device) of weights, slots and gradients.
    """

    strategy: str
    devices: tuple
    num_replicas: int
    num_workers: int = 1
    worker: int = 0
    num_servers: int = 0
    reasons: tuple = ()
    details: tuple = ()
    profile: object = None
    groups: tuple = ()
    memory: tuple = ()

    @property
    def is_chief(self):
        """Whether this process writes the shared files."""
        return self.worker == 0

    def reason(self, field):
        """Returns why a field has its value."""
        return dict(self.reasons).get(field, "")

    def with_details(self, **details):
        """Returns the plan with more lines; underscores in names become blanks."""
        merged = dict(self.details)
        merged.update({name.replace("_", " "): str(text) for name, text in details.items()})
        return dataclasses.replace(self, details=tuple(merged.items()))

    def on(self, **hardware):
        """Returns the `scaling.Forecast` for hardware that one does not have.

        Args:
            **hardware: Arguments of `scaling.predict`: gpus, workers, bandwidth, latency,
                batch_size, speedup, within_worker.

        Raises:
            ValueError: When nothing has been measured, or an argument is wrong.

        Example:

        ```python
        trainer.measure(x, y, batch_size=64)
        print(trainer.plan.on(gpus=8, workers=4, bandwidth="25GB/s"))
        ```
        """
        from keras_replicator.scaling import predict

        if self.profile is None:
            raise ValueError(
                "A forecast needs the measured time of a step. Call trainer.measure(x, y, "
                "batch_size=…) first, and ask trainer.plan.on(…) then. Received: a plan without "
                "a profile"
            )
        return predict(self.profile, **hardware)

    def rows_per_replica(self, batch_size):
        """Returns the rows of each replica for a global batch."""
        cuts = [part * batch_size // self.num_replicas for part in range(self.num_replicas + 1)]
        return tuple(end - begin for begin, end in zip(cuts, cuts[1:]))

    def __str__(self):
        lines = [
            ("strategy", self.strategy, self.reason("strategy")),
            ("devices", ", ".join(self.devices), self.reason("devices")),
            ("replicas", str(self.num_replicas), self.reason("num_replicas")),
        ]
        if self.num_servers:
            text = (
                f"{self.num_workers}, each in its own time; parameter servers: {self.num_servers}"
            )
            lines.append(("workers", text, self.reason("num_workers")))
        elif self.num_workers > 1:
            role = f"{self.worker} of {self.num_workers}" + (" (chief)" if self.is_chief else "")
            lines.append(("worker", role, self.reason("num_workers")))
        if self.groups:
            text = ", ".join(" + ".join(group) for group in self.groups)
            lines.append(("logical devices", text, "of each replica"))
        lines += [(topic, text, "") for topic, text in self.details]
        if self.memory:
            lines.append(("memory per device", footprint.describe(self.memory), ""))
        width = max(len(topic) for topic, _, _ in lines)
        rows = [
            f"  {topic:<{width}}  {text}" + (f"  ({why})" if why else "")
            for topic, text, why in lines
        ]
        return "\n".join(["Plan", *rows])


def make_plan(hardware, cluster=None, *, strategy="auto", devices=None):
    """Chooses what runs where.

    Args:
        hardware: The `Hardware` of this machine.
        cluster: The `Cluster` of the job, or None for a single machine.
        strategy: A name out of `STRATEGIES`.
        devices: None for all that were found, an int for that many, names, or a list of names
            for each replica (its logical devices).

    Returns:
        A `Plan`.

    Raises:
        ValueError: For an unknown strategy, devices that do not exist, or a request that
            contradicts the cluster.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"`strategy` must be one of {', '.join(map(repr, STRATEGIES))}, or a "
            f"tf.distribute.Strategy. Received: strategy={strategy!r}"
        )
    if cluster is not None and cluster.has_parameter_servers and cluster.task_type != "evaluator":
        return _plan_parameter_servers(hardware, cluster, strategy, devices)
    if strategy == "parameter_server":
        raise ValueError(
            "`strategy='parameter_server'` needs a cluster with parameter servers, and none was "
            "found. Start the script by `keras-replicator launch --workers 2 --ps 1 script.py`, "
            "set TF_CONFIG with a chief, workers and ps, or call kr.simulate_cluster(workers=2, "
            "servers=1) at the top of the script. Received: strategy='parameter_server', "
            f"cluster: {cluster}"
        )
    if cluster is not None and cluster.worker_index is None:
        raise ValueError(
            f"This process is the {cluster.task_type} of its job, which takes no part in training. "
            "Start its script without the cluster's variables (unset TF_CONFIG). "
            f"Received: {cluster}"
        )
    workers = 1 if cluster is None else cluster.num_workers
    size = _group_size(devices)
    if size:
        devices = [name for group in devices for name in group]
    names, why_devices = choose_devices(hardware, devices, strategy)
    groups = tuple(names[first : first + size] for first in range(0, len(names), size or 1))
    names = tuple(group[0] for group in groups) if size else names
    name, why = _choose_strategy(hardware, cluster, strategy, names, workers)
    if size and name not in ("one_device", "mirrored"):
        raise ValueError(
            "`devices` with a group for each replica is for one machine without TPUs. Name one "
            f"device for each replica. Received: devices={devices!r}, strategy={name!r}"
        )
    if name == "one_device":
        if len(names) > 1:
            why_devices += "; one_device takes the first"
        names = names[:1]
    return Plan(
        strategy=name,
        devices=names,
        num_replicas=len(names) * workers,
        num_workers=workers,
        worker=0 if cluster is None else cluster.worker_index,
        groups=groups[: len(names)] if size else (),
        reasons=(
            ("strategy", why),
            ("devices", why_devices),
            ("num_replicas", f"{len(names)} device(s) x {workers} worker(s)"),
            ("num_workers", "" if cluster is None else f"from {cluster.source}"),
        ),
    )


def _plan_parameter_servers(hardware, cluster, strategy, devices):
    if strategy not in ("auto", "parameter_server"):
        raise ValueError(
            f"`strategy={strategy!r}` does not use the parameter servers that this job has (from "
            f"{cluster.source}). Use strategy='auto' or 'parameter_server', or leave out the 'ps' "
            f"tasks: workers then train in step. Received: strategy={strategy!r}"
        )
    names = hardware.gpus or hardware.cpus
    if devices not in (None, 1) or (cluster.task_type == "worker" and len(names) > 1):
        raise ValueError(
            "Under parameter servers a worker has one device: TensorFlow runs no synchronous group "
            "of several inside of a worker. Start one worker for each device (`keras-replicator "
            "launch --workers N --ps M` gives each a GPU of its own where there are some), or use "
            "strategy='multi_worker' for several devices a worker. "
            f"Received: devices={devices!r}, devices found: {', '.join(names)}"
        )
    servers = len(cluster.ps)
    return Plan(
        strategy="parameter_server",
        devices=names[:1],
        num_replicas=1,
        num_workers=cluster.num_workers,
        num_servers=servers,
        reasons=(
            ("strategy", f"{servers} parameter server(s), from {cluster.source}"),
            ("devices", "of each worker"),
            ("num_replicas", "in one update: workers do not wait for each other"),
            ("num_workers", f"from {cluster.source}"),
        ),
    )


def _choose_strategy(hardware, cluster, strategy, names, workers):
    if strategy == "tpu" and not hardware.tpus:
        raise ValueError(
            "`strategy='tpu'` needs a TPU, and none was found. "
            f"Received: strategy='tpu', devices found: {', '.join(hardware.names)}"
        )
    if strategy == "multi_worker" and workers < 2:
        raise ValueError(
            "`strategy='multi_worker'` needs a cluster of two or more workers, and none was found. "
            "Set TF_CONFIG, start the script by `keras-replicator launch --workers 2 script.py`, "
            "or under Slurm by srun. Received: strategy='multi_worker', workers found: 1"
        )
    if workers > 1:
        if strategy in ("one_device", "mirrored", "tpu"):
            raise ValueError(
                f"`strategy={strategy!r}` uses one machine, but this process belongs to a job of "
                f"{workers} workers (from {cluster.source}): each would train a model of its own. "
                "Use strategy='auto', or unset the cluster's variables. "
                f"Received: strategy={strategy!r}"
            )
        return "multi_worker", f"{workers} workers, from {cluster.source}"
    if strategy != "auto":
        return strategy, "asked for"
    if hardware.tpus:
        return "tpu", "TPU found"
    if len(names) > 1:
        return "mirrored", f"{len(names)} devices"
    return "one_device", "one device"


def _group_size(devices):
    """Returns how many logical devices each replica has, or 0 where `devices` holds no groups."""
    if not isinstance(devices, (list, tuple)):
        return 0
    sizes = [len(group) if isinstance(group, (list, tuple)) else 0 for group in devices]
    if not any(sizes):
        return 0
    if len(set(sizes)) > 1:
        raise ValueError(
            "`devices` must hold names, or a group for each replica, all of the same size. "
            f"Received: devices={devices!r}"
        )
    return sizes[0]


def choose_devices(hardware, devices, strategy):
    """Returns `(names, why)` of this worker's devices, as in `make_plan`."""
    best = hardware.tpus or hardware.gpus or hardware.cpus
    if strategy == "one_device" and devices is None:
        return best[:1], "the first that was found"
    if devices is None:
        kind = "simulated CPUs" if hardware.simulated and best == hardware.cpus else "found"
        return best, f"all {len(best)} that were found" if kind == "found" else kind
    if isinstance(devices, bool) or not isinstance(devices, (int, list, tuple)):
        raise ValueError(
            "`devices` must be None, a number of devices, or a list of names such as "
            f"['GPU:0', 'GPU:1']. Received: devices={devices!r}"
        )
    if isinstance(devices, int):
        if not 1 <= devices <= len(best):
            raise ValueError(
                f"`devices` asks for {devices} device(s), and {len(best)} were found "
                f"({', '.join(best)}). Ask for fewer, or split the CPU with "
                f"kr.simulate_devices({max(devices, 1)}) at the top of the script. "
                f"Received: devices={devices}"
            )
        return best[:devices], "asked for"
    names = tuple(_normal(name) for name in devices)
    if not names:
        raise ValueError("`devices` is empty. Name at least one device. Received: devices=[]")
    for name in names:
        if name not in hardware.names:
            raise ValueError(
                f"`devices` names {name}, which was not found. Found: "
                f"{', '.join(hardware.names)}. More CPUs can be simulated by "
                f"kr.simulate_devices(n) at the top of the script. Received: devices={devices!r}"
            )
    if len(set(names)) != len(names):
        raise ValueError(f"`devices` names a device twice. Received: devices={devices!r}")
    return names, "asked for"


def _normal(name):
    kind, _, number = str(name).replace("/device:", "/").split("/")[-1].rpartition(":")
    return f"{kind.split(':')[-1].upper()}:{number}"


def describe_machine():
    """Returns the text of the plan that `strategy='auto'` makes on this machine."""
    import os

    from keras_replicator.cluster import detect_cluster
    from keras_replicator.hardware import detect_hardware

    return str(make_plan(detect_hardware(), detect_cluster(os.environ)))
