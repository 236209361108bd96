"""From a request for a mesh to the plan and the engine of it."""

import dataclasses
import os

from keras_replicator import mesh_planning
from keras_replicator.cluster import check_expected_workers, detect_cluster
from keras_replicator.engines.mesh import MeshEngine
from keras_replicator.engines.planned_mesh import PlannedMeshEngine
from keras_replicator.hardware import detect_hardware, imagined_hardware
from keras_replicator.layout import AUTO, Layout, as_layout, devices_of
from keras_replicator.mesh_plan import make_mesh_plan


def choose_mesh(strategy, layout, devices, expected_workers):
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
    if cluster is not None and cluster.num_workers > 1:
        raise ValueError(
            "A mesh over several workers is not available in this version. Start the script as one "
            f"process, on one machine. Received: {cluster}"
        )
    if devices is None:
        devices = devices_of(layout)
    layout = None if layout is None else as_layout(layout)
    plan, layout = make_mesh_plan(detect_hardware(), layout, devices)
    return plan, MeshEngine(layout, plan.devices)


def _plan_only(layout, mesh):
    if layout is None:
        layout = Layout(mesh, AUTO)
    else:
        layout = dataclasses.replace(as_layout(layout), mesh=mesh)
    plan, layout = make_mesh_plan(imagined_hardware(layout.num_devices), layout, None)
    return plan, PlannedMeshEngine(layout, plan.devices)
