"""TF_CONFIG: TensorFlow's own description of a job, which Vertex AI, Ray and launchers set."""

import json
from collections.abc import Mapping

from keras_replicator.cluster.cluster import ROLES, Cluster, ClusterError
from keras_replicator.cluster.variables import quote

VARIABLES = ("TF_CONFIG",)

EXAMPLE = (
    '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the job that TF_CONFIG describes; None where it is not set, or describes none."""
    config = _parse(environ)
    cluster, task = config.get("cluster") or {}, config.get("task") or {}
    if not cluster and not task:
        return None
    if not cluster:
        raise _error(environ, "TF_CONFIG has a task, but no cluster that it belongs to.")
    addresses = _read_addresses(environ, cluster)
    task_type, task_index = _read_task(environ, task, addresses)
    return Cluster(task_type=task_type, task_index=task_index, source="TF_CONFIG", **addresses)


def _error(environ, what):
    return ClusterError(f"{what} {quote(environ, VARIABLES)} It should look like this: {EXAMPLE}")


def _parse(environ):
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as err:
        raise _error(environ, f"TF_CONFIG is not JSON ({err}).") from err
    if not isinstance(config, dict):
        raise _error(environ, f"TF_CONFIG must be a JSON object, not a {type(config).__name__}.")
    for key in ("cluster", "task"):
        if not isinstance(config.get(key) or {}, dict):
            raise _error(environ, f"The {key} in TF_CONFIG must be a JSON object.")
    return config


def _read_addresses(environ, cluster):
    unknown = sorted(set(cluster) - set(ROLES))
    if unknown:
        raise _error(
            environ, f"TF_CONFIG has the unknown role {unknown[0]!r}; roles are {', '.join(ROLES)}."
        )
    addresses = {}
    for role, listed in cluster.items():
        if not isinstance(listed, list) or not all(_is_address(entry) for entry in listed):
            raise _error(
                environ, f'The addresses of {role!r} in TF_CONFIG must be a list of "host:port".'
            )
        addresses[role] = tuple(listed)
    _check_counts(environ, addresses)
    return addresses


def _is_address(entry):
    if not isinstance(entry, str):
        return False
    host, _, port = entry.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port) <= 65535


def _check_counts(environ, addresses):
    everything = [address for listed in addresses.values() for address in listed]
    repeated = sorted({address for address in everything if everything.count(address) > 1})
    if repeated:
        raise _error(environ, f"TF_CONFIG gives the address {repeated[0]!r} to two tasks.")
    if len(addresses.get("chief", ())) > 1:
        raise _error(environ, f"TF_CONFIG has {len(addresses['chief'])} chiefs; a job has one.")
    if addresses.get("ps") and not addresses.get("chief"):
        raise _error(
            environ, "TF_CONFIG has parameter servers, but no chief that coordinates the workers."
        )
    if not addresses.get("worker") and (addresses.get("ps") or not addresses.get("chief")):
        raise _error(environ, "TF_CONFIG has no worker.")


def _read_task(environ, task, addresses):
    everyone = [(role, i) for role, listed in addresses.items() for i in range(len(listed))]
    if not task and len(everyone) == 1:
        return everyone[0]
    if "type" not in task or "index" not in task:
        raise _error(environ, "TF_CONFIG does not say which task this process is: type and index.")
    task_type, task_index = task["type"], str(task["index"])
    if not task_index.isdecimal():
        raise _error(
            environ, f"The task's index in TF_CONFIG must be an integer, not {task['index']!r}."
        )
    task_index = int(task_index)
    # An evaluator watches from outside: TensorFlow's guides leave it out of the cluster.
    outside = task_type == "evaluator" and not addresses.get("evaluator")
    if not outside and (task_type, task_index) not in everyone:
        raise _error(
            environ,
            f"This process is {task_type!r} {task_index}, which TF_CONFIG's cluster does not list.",
        )
    return task_type, task_index
