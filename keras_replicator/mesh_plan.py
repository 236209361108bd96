"""The plan of a mesh: which devices it takes, and why. Pure, as `plan.py`."""

from keras_replicator.layout import AUTO, Layout
from keras_replicator.plan import Plan, choose_devices


def make_mesh_plan(hardware, layout, devices, cluster=None):
    """Chooses the devices of a mesh.

    Args:
        hardware: The `Hardware` of this machine.
        layout: A `Layout`, or None: weights are split over all devices of a worker by
            `kr.auto_layout`, rows over workers.
        devices: None, a number, or names, as in `make_plan`; those of each worker.
        cluster: The `Cluster` of a job of several workers, or None.

    Returns:
        `(plan, layout)`, the layout with every size known.

    Raises:
        ValueError: When the mesh does not fit the devices, or the job has parameter servers.
    """
    if cluster is not None and (cluster.has_parameter_servers or cluster.worker_index is None):
        raise ValueError(
            "A mesh lies over the workers of a job, and this process is none of them, or the job "
            "has parameter servers. Start its script without the cluster's variables (unset "
            f"TF_CONFIG), or leave out the 'ps' tasks. Received: {cluster}"
        )
    workers = 1 if cluster is None else cluster.num_workers
    why = "asked for" if layout is None else "a layout was given"
    if layout is None:
        layout = Layout({"batch": workers, "model": -1}, AUTO)
    names, why_devices = choose_devices(hardware, devices, "mesh")
    each, rest = divmod(layout.num_devices, workers)
    if devices is None and not rest and 0 < each < len(names):
        names, why_devices = names[:each], "as many as the mesh has"
    layout = layout.on(len(names) * workers, workers)
    return Plan(
        strategy="mesh",
        devices=names,
        num_replicas=1,
        num_workers=workers,
        worker=0 if cluster is None else cluster.worker_index,
        reasons=(
            ("strategy", why),
            ("devices", why_devices),
            ("num_replicas", f"over {layout.num_devices} devices: {layout.describe()}"),
            ("num_workers", "" if cluster is None else f"from {cluster.source}"),
        ),
    ), layout
