"""From a request for a mesh to the plan and the engine of it."""

import dataclasses
import os

import tensorflow as tf

from keras_replicator import compat, mesh_planning, workers
from keras_replicator.cluster import check_expected_workers, detect_cluster
from keras_replicator.engines.joining import meet, watch_over
from keras_replicator.engines.mesh import MeshEngine
from keras_replicator.engines.planned_mesh import PlannedMeshEngine
from keras_replicator.hardware import configured_hardware, detect_hardware, imagined_hardware
from keras_replicator.layout import AUTO, Layout, as_layout, devices_of
from keras_replicator.mesh_plan import make_mesh_plan

_joined = {}  # "names": TensorFlow's names of the workers, once this process is one of several


def choose_mesh(strategy, layout, devices, expected_workers, peer_timeout=60, start_timeout=600):
    """Returns `(plan, engine)` where a mesh was asked for, else None; arguments as `choose_engine`.

    Raises:
        ValueError: When a layout is given beside another strategy, or does not fit.
    """
    if mesh_planning.requested() is not None:
        return _plan_only(layout, mesh_planning.requested())
    if layout is None and not (isinstance(strategy, str) and strategy == "mesh"):
        return None
    if strategy not in ("auto", "mesh"):
        raise ValueError(
            "`layout` is for a mesh. Leave out `strategy`, or pass strategy='mesh'. "
            f"Received: strategy={strategy!r}, layout={layout!r}"
        )
    cluster = detect_cluster(os.environ)
    check_expected_workers(cluster, expected_workers)
    if cluster is not None and cluster.num_workers == 1 and not cluster.has_parameter_servers:
        cluster = None
    if devices is None and cluster is None:
        devices = devices_of(layout)
    layout = None if layout is None else as_layout(layout)
    hardware = detect_hardware() if cluster is None else configured_hardware()
    plan, layout = make_mesh_plan(hardware, layout, devices, cluster)
    if cluster is None:
        return plan, MeshEngine(layout, plan.devices)
    names = _join(cluster, plan, peer_timeout, start_timeout)
    watch = watch_over(cluster, names, peer_timeout)
    return plan, MeshEngine(layout, plan.devices, cluster, watch, start_timeout)


def _join(cluster, plan, peer_timeout, start_timeout):
    """Connects this process with the other workers, once; returns TensorFlow's names of them."""
    if _joined:
        return _joined["names"]
    if compat.tensorflow_started():
        raise RuntimeError(
            "A job of several workers was found, and TensorFlow has already started in this "
            "process, so the workers cannot be connected any more. Make the ReplicatedTrainer "
            f"with a layout before any operation, tensor or model. Received: {cluster}"
        )
    meet(cluster, start_timeout)
    kind = plan.devices[0].partition(":")[0]
    try:
        _joined["names"] = compat.join_mesh(
            cluster.worker_index, cluster.worker_addresses, kind, peer_timeout, start_timeout
        )
    except tf.errors.OpError as error:
        raise workers.not_connected(error, cluster) from error
    return _joined["names"]


def _plan_only(layout, mesh):
    if layout is None:
        layout = Layout(mesh, AUTO)
    else:
        layout = dataclasses.replace(as_layout(layout), mesh=mesh)
    plan, layout = make_mesh_plan(imagined_hardware(layout.num_devices), layout, None)
    return plan, PlannedMeshEngine(layout, plan.devices)
