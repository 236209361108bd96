"""What is installed on this machine, which devices it has, and which cluster it belongs to."""

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping

from keras_replicator.cluster import ClusterError, explain_cluster
from keras_replicator.launch.resources import find_cores
from keras_replicator.version import __version__

PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "numpy",
    "tensorboard",
    "tensorflow-datasets",
)
# What changes how a run is placed; nothing that could be a secret.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "KERAS_BACKEND",
    "KERAS_REPLICATOR_HOSTS",
    "KERAS_REPLICATOR_PORT",
    "KERAS_REPLICATOR_RESTART",
    "KERAS_REPLICATOR_SIMULATED_DEVICES",
    "OMP_NUM_THREADS",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


def describe_environment(environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """Returns a text for people (and bug reports), and whether the environment is in order.

    Imports TensorFlow to list its devices.

    Args:
        environ: The environment to read; by default this process's.
    """
    environ = os.environ if environ is None else environ
    cluster, is_in_order = _describe_cluster(environ)
    sections = {
        "versions": _describe_versions(),
        "devices": _describe_devices(),
        "environment": [f"{name}={environ[name]}" for name in VARIABLES if environ.get(name)],
        "cluster": cluster,
    }
    lines = []
    for title, content in sections.items():
        lines += [title, *(f"  {line}" for line in content or ["nothing is set"])]
    return "\n".join(lines), is_in_order


def _describe_versions():
    import keras

    lines = [
        f"keras_replicator {__version__}",
        f"Python {platform.python_version()} ({sys.executable})",
        platform.platform(),
    ]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        backend = f" (backend: {keras.backend.backend()})" if name == "keras" else ""
        lines.append(f"{name} {version}{backend}")
    return lines


def _describe_devices():
    import tensorflow as tf

    num_cores, usable = os.cpu_count() or 1, len(find_cores())
    cores = f"{num_cores} CPU core{'' if num_cores == 1 else 's'}"
    lines = [cores if usable in (0, num_cores) else f"{cores}, {usable} of them usable here"]
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device)
        model = f" {details['device_name']}" if "device_name" in details else ""
        lines.append(f"{device.name.removeprefix('/physical_device:')}{model}")
    return lines


def _describe_cluster(environ):
    try:
        return explain_cluster(environ).split("\n"), True
    except ClusterError as err:
        return [f"error: {err}"], False
