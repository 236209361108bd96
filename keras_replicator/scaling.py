"""How fast a model would train on hardware that one does not have: a pure prediction.

    profile = trainer.measure(x, y, batch_size=64)       # one replica of this machine
    print(trainer.plan.on(gpus=8, workers=4, bandwidth="25GB/s"))

A step takes as long as its largest replica computes, and then as long as the gradients take to be
added up over all replicas. With r rows on the largest replica, N replicas and m bytes,

    compute = fixed + r * per_row
    reduce  = 2 (N - 1) / N * m / bandwidth  +  2 (N - 1) * latency

which is the ring all-reduce (Patarasuk & Yuan 2009): every replica sends and receives each byte
twice, short of its own share, whatever N is. The slowest link of the ring counts: that between
workers, where there are several. Reduction and computation do not overlap here: the gradients are
packed and reduced at once, when all of them are known.
"""

import dataclasses
import re

from keras_replicator.data.split import boundary

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
# NVLink of a server of 8 GPUs, per direction and GPU, as far as NCCL's rings use it.
_WITHIN_WORKER = 100e9


@dataclasses.dataclass(frozen=True)
class Profile:
    """What one replica was measured to need, see `ReplicatedTrainer.measure`.

    Attributes:
        device: What it was measured on.
        batch_size: Rows of the global batch that was asked for.
        seconds_fixed: Seconds of a step, whatever its rows.
        seconds_per_row: Seconds of each row.
        update_bytes: Bytes of gradients that an update reduces.
        step_bytes: Bytes that every step reduces: statistics of normalization.
        state_bytes: Bytes of weights, optimizer slots and one gradient, on every device.
        bytes_per_row: Memory of a row on its way through the model, or None where not known.
        accumulation: Steps of an update.
    """

    device: str
    batch_size: int
    seconds_fixed: float
    seconds_per_row: float
    update_bytes: int
    step_bytes: int = 0
    state_bytes: int = 0
    bytes_per_row: float | None = None
    accumulation: int = 1

    def compute_seconds(self, rows):
        """Returns the seconds in which one replica computes a step of so many rows."""
        return self.seconds_fixed + rows * self.seconds_per_row


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A prediction for one hardware; `print(forecast)` gives it and a table over replicas.

    Attributes:
        workers: Machines.
        replicas: Devices of all machines.
        batch_size: Rows of a global batch.
        rows_per_replica: Rows of each replica.
        memory_bytes: Memory of the fullest device, or None where not known.
        update_bytes: Bytes reduced per update.
        compute_seconds: Seconds of a step without reduction.
        reduce_seconds: Seconds of the reduction of a step.
        one_replica_seconds: Seconds in which one replica does its own rows alone.
        bandwidth: Bytes per second of the slowest link of the ring.
        latency: Seconds of a message over it.
        device: What was measured, and how much faster it was taken to be.
        table: Tuple of `(replicas, compute, reduce, step seconds, efficiency)` with the same rows
            on each replica.
    """

    workers: int
    replicas: int
    batch_size: int
    rows_per_replica: tuple
    memory_bytes: float | None
    update_bytes: int
    compute_seconds: float
    reduce_seconds: float
    one_replica_seconds: float
    bandwidth: float
    latency: float
    device: str
    table: tuple = ()

    @property
    def step_seconds(self):
        """Seconds of a step."""
        return self.compute_seconds + self.reduce_seconds

    @property
    def rows_per_second(self):
        """Rows of all replicas per second."""
        return self.batch_size / self.step_seconds

    @property
    def efficiency(self):
        """Rows per second, over replicas times those of one replica with its own rows."""
        alone = max(self.rows_per_replica) / self.one_replica_seconds
        return self.rows_per_second / (self.replicas * alone)

    def __str__(self):
        least, most = min(self.rows_per_replica), max(self.rows_per_replica)
        rows = str(most) if least == most else f"{least} to {most}"
        memory = "not known" if self.memory_bytes is None else readable(self.memory_bytes)
        lines = [
            ("replicas", f"{self.replicas} on {self.workers} worker(s)"),
            ("global batch", f"{self.batch_size} rows, {rows} per replica"),
            ("memory per device", memory),
            ("reduced per update", readable(self.update_bytes)),
            ("link", f"{readable(self.bandwidth)}/s, {1e6 * self.latency:.3g} µs"),
            ("computing", f"{_time(self.compute_seconds)} a step ({self.device})"),
            ("reducing", f"{_time(self.reduce_seconds)} a step"),
            ("step", f"{_time(self.step_seconds)}, {self.rows_per_second:,.0f} rows per second"),
            ("efficiency", f"{self.efficiency:.0%} of {self.replicas} times one replica"),
        ]
        width = max(len(name) for name, _ in lines)
        text = ["Forecast", *(f"  {name:<{width}}  {value}" for name, value in lines)]
        if self.table:
            text += ["", f"  With {most} rows on each replica:"]
            text.append(
                f"  {'replicas':>8}{'computing':>12}{'reducing':>12}{'step':>12}{'efficient':>12}"
            )
            for count, *seconds, share in self.table:
                cells = "".join(f"{_time(value):>12}" for value in seconds)
                text.append(f"  {count:>8}{cells}{share:>12.0%}")
        return "\n".join(text)


def ring_seconds(size, replicas, bandwidth, latency=0.0):
    """Returns the seconds of a ring all-reduce.

    Args:
        size: Bytes on each replica.
        replicas: Replicas in the ring.
        bandwidth: Bytes per second of its slowest link.
        latency: Seconds of a message over it.

    Example:

    >>> ring_seconds(100e6, 4, 1e9)  # each byte twice, less a quarter
    0.15
    >>> ring_seconds(100e6, 1, 1e9)
    0.0
    """
    if replicas == 1:
        return 0.0
    return 2 * (replicas - 1) / replicas * size / bandwidth + 2 * (replicas - 1) * latency


def predict(
    profile,
    *,
    gpus=1,
    workers=1,
    bandwidth="25GB/s",
    latency="10us",
    batch_size=None,
    speedup=1.0,
    within_worker=None,
):
    """Returns the `Forecast` of a profile for some hardware.

    Args:
        profile: A `Profile`.
        gpus: Devices of each worker.
        workers: Machines.
        bandwidth: Of the link between workers (between devices, with one worker): "25GB/s",
            "10Gb/s", or bytes per second.
        latency: Of the same link: "10us", or seconds.
        batch_size: Rows of a global batch; default, that of the profile.
        speedup: How many times as fast as the measured device each of these is.
        within_worker: Bandwidth between the devices of a worker, where it is slower than 100 GB/s.

    Raises:
        ValueError: When a number cannot be read or is not positive.
    """
    for name, value in (("gpus", gpus), ("workers", workers)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` must be an int of at least 1. Received: {name}={value!r}")
    if not speedup > 0:
        raise ValueError(f"`speedup` must be above 0. Received: speedup={speedup!r}")
    bandwidth, latency = parse_bandwidth(bandwidth), parse_seconds(latency)
    inside = min(_WITHIN_WORKER, parse_bandwidth(within_worker or _WITHIN_WORKER))
    slowest = min(bandwidth, inside) if workers > 1 and gpus > 1 else bandwidth
    size = batch_size or profile.batch_size
    replicas = gpus * workers
    rows = tuple(
        boundary(size, part + 1, replicas) - boundary(size, part, replicas)
        for part in range(replicas)
    )
    most = max(rows)

    def times(count):
        compute = profile.compute_seconds(most) / speedup
        update = ring_seconds(profile.update_bytes, count, slowest, latency)
        step = ring_seconds(profile.step_bytes, count, slowest, latency)
        return compute, update / profile.accumulation + (step if profile.step_bytes else 0.0)

    compute, reduce = times(replicas)
    memory = None
    if profile.bytes_per_row is not None:
        memory = profile.state_bytes + most * profile.bytes_per_row
    table = []
    for count in sorted({2**power for power in range(20) if 2**power < replicas} | {replicas}):
        computing, reducing = times(count)
        total = computing + reducing
        table.append((count, computing, reducing, total, computing / total))
    device = (
        profile.device if speedup == 1 else f"{profile.device}, taken {speedup:g} times as fast"
    )
    return Forecast(
        workers=workers,
        replicas=replicas,
        batch_size=size,
        rows_per_replica=rows,
        memory_bytes=memory,
        update_bytes=profile.update_bytes,
        compute_seconds=compute,
        reduce_seconds=reduce,
        one_replica_seconds=compute,
        bandwidth=slowest,
        latency=latency,
        device=device,
        table=tuple(table),
    )


def parse_bandwidth(value):
    """Returns bytes per second.

    Example:

    >>> parse_bandwidth("25GB/s"), parse_bandwidth("10Gb/s")
    (25000000000.0, 1250000000.0)

    Raises:
        ValueError: When it cannot be read.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)i?([bB])(?:/s|ps)\s*", str(value))
    if not match or float(match[1]) <= 0:
        raise ValueError(
            "`bandwidth` must be a number with a unit, such as '25GB/s' (bytes) or '10Gb/s' "
            f"(bits). Received: bandwidth={value!r}"
        )
    return float(match[1]) * _UNITS[match[2].lower()] * (1.0 if match[3] == "B" else 0.125)


def parse_seconds(value):
    """Returns seconds.

    Example:

    >>> parse_seconds("5ms"), parse_seconds(0.5)
    (0.005, 0.5)

    Raises:
        ValueError: When it cannot be read.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|ms|us|µs|ns)\s*", str(value))
    if not match:
        raise ValueError(
            "`latency` must be a number with a unit, such as '10us' or '0.5ms'. "
            f"Received: latency={value!r}"
        )
    return float(match[1]) * _SECONDS[match[2]]


def readable(size):
    """Returns bytes for people.

    Example:

    >>> readable(102_228_128)
    '102 MB'
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def _time(seconds):
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
