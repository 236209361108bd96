"""The plan of a mesh: which devices it takes, and why. Pure, as `plan.py`."""

from keras_replicator.layout import AUTO, Layout
from keras_replicator.plan import Plan, choose_devices


def make_mesh_plan(hardware, layout, devices):
    """Chooses the devices of a mesh.

    Args:
        hardware: The `Hardware` of this machine.
        layout: A `Layout`, or None: weights are split over all devices by `kr.auto_layout`.
        devices: None, a number, or names, as in `make_plan`.

    Returns:
        `(plan, layout)`, the layout with every size known.

    Raises:
        ValueError: When the mesh does not fit the devices.
    """
    why = "asked for" if layout is None else "a layout was given"
    if layout is None:
        layout = Layout({"batch": 1, "model": -1}, AUTO)
    names, why_devices = choose_devices(hardware, devices, "mesh")
    wanted = layout.num_devices
    if devices is None and 0 < wanted < len(names):
        names, why_devices = names[:wanted], "as many as the mesh has"
    layout = layout.on(len(names))
    return Plan(
        strategy="mesh",
        devices=names,
        num_replicas=1,
        reasons=(
            ("strategy", why),
            ("devices", why_devices),
            ("num_replicas", f"over {layout.num_devices} devices: {layout.describe()}"),
        ),
    ), layout
