"""What the processes of one machine share out: ports, CPU cores and GPUs."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence

FIRST_PORT = 10_000
# Where Linux does not say: its default.
FIRST_EPHEMERAL_PORT = 32_768
NUM_TRIES = 1_000


def find_free_ports(count: int) -> list[int]:
    """Returns `count` different ports that nothing listens on.

    All are bound before the first is released, so they differ. They lie below the ephemeral ports:
    the connections that the processes of the job open to each other, while the last of them still
    start, cannot take one.

    Raises:
        RuntimeError: when too few ports are free.
    """
    ports = list(range(FIRST_PORT, _read_first_ephemeral_port()))
    candidates = random.SystemRandom().sample(ports, min(NUM_TRIES + count, len(ports)))
    found = []
    with contextlib.ExitStack() as stack:
        for port in candidates:
            if len(found) == count:
                break
            bound = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                bound.bind(("", port))
                found.append(port)
    if len(found) < count:
        raise RuntimeError(
            f"Only {len(found)} of the {count} ports that this job needs are free on this machine. "
            "End other programs that listen on ports, or start fewer processes."
        )
    return found


def _read_first_ephemeral_port():
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            first = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return FIRST_EPHEMERAL_PORT
    # Some machines give out everything from 1024 on; then any port is as good as another.
    return first if first > FIRST_PORT + 1_000 else FIRST_EPHEMERAL_PORT


def find_cores() -> list[int]:
    """Returns the CPU cores that this process may use; empty where the system cannot say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that a process with this environment would see, without TensorFlow."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        # CUDA stops at the first name that is none.
        return names[: names.index("-1")] if "-1" in names else names
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False
    )
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in lines))]


def share_out(things: Sequence, count: int) -> list[list] | None:
    """Returns `count` equal shares, in order; None when there are too few for one each.

    Example:

    >>> share_out([0, 1, 2, 3, 4], 2)
    [[0, 1], [2, 3]]
    >>> share_out([0], 2) is None
    True
    """
    size = len(things) // count
    if size == 0:
        return None
    return [list(things[i * size : (i + 1) * size]) for i in range(count)]


@contextlib.contextmanager
def pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """What this thread starts meanwhile runs on these cores only; on all, when there are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
