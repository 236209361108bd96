"""How much memory this process and its devices use, and how much there is.

On GPUs the numbers are those of TensorFlow's allocator, over the fullest device; on CPUs those of
the process, since all logical CPUs share its memory.
"""

import pathlib

import tensorflow as tf

from keras_replicator import compat

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def limit(devices):
    """Returns the bytes that a device (or the process) can use at most, or None where unknown.

    Args:
        devices: Names such as "GPU:0" or "CPU:1".
    """
    accelerators = _accelerators(devices)
    if accelerators:
        limits = compat.device_memory_limits()
        found = [limits[name] for name in accelerators if name in limits]
        return min(found) if found else None
    resident, available = _status("VmRSS"), _available()
    return None if resident is None or available is None else resident + available


def peak(devices):
    """Returns the peak of memory in use since `reset_peak`, in bytes; 0 where unknown."""
    accelerators = _accelerators(devices)
    if accelerators:
        return max(tf.config.experimental.get_memory_info(name)["peak"] for name in accelerators)
    return _status("VmHWM") or 0


def reset_peak(devices):
    """Starts a new peak. Where the system does not allow it, `peak` is that of the whole run."""
    for name in _accelerators(devices):
        tf.config.experimental.reset_memory_stats(name)
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass


def _accelerators(devices):
    return [name for name in devices if not name.startswith("CPU")]


def _status(field):
    """A field of /proc/self/status in bytes, or None where there is none."""
    return _kilobytes("/proc/self/status", field)


def _available():
    """Bytes that the machine, or the container, has left; None where the system does not tell."""
    available = _kilobytes("/proc/meminfo", "MemAvailable")
    for path in _CGROUP_LIMITS:
        try:
            text = pathlib.Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit() and available is not None:
            return min(available, max(int(text) - (_status("VmRSS") or 0), 0))
    return available


def _kilobytes(path, field):
    try:
        with open(path, encoding="ascii", errors="replace") as lines:
            line = next(line for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(line.split()[1])
