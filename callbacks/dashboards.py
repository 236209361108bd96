"""The layout of TensorBoard's custom-scalars page: Training, Scaling, Health."""

import re

_SCALING = {
    "rows_per_second": "rows per second",
    "rows_per_second_per_replica": "rows per second and replica",
    "steps_per_second": "steps per second",
    "scaling_efficiency": "scaling efficiency",
    "input_wait_share": "share of time waiting for input",
    "reduce_share": "share of time reducing",
}
_HEALTH = {
    "learning_rate": "learning rate",
    "staleness": "staleness (updates of other workers)",
    "gradient_norm": "gradient norm",
    "loss_scale": "loss scale",
    "host_memory": "memory of the host process (bytes)",
    "device_memory": "memory of the fullest device (bytes)",
}


def dashboards(names):
    """Sorts the logs of an epoch into dashboards.

    Args:
        names: names of logs, such as "loss", "val_loss", "rows_per_second".

    Returns:
        Dict from the title of a dashboard to a dict from the title of a chart to the regular
        expression of its tags. Training and validation share a chart; several optimizers do, too.

    Example:

    >>> dashboards(["loss", "val_loss", "learning_rate"])["Training"]
    {'loss': '^epoch_loss$'}
    """
    names = {name.removeprefix("val_") for name in names}
    scaling = {title: f"^epoch_{key}$" for key, title in _SCALING.items() if key in names}
    families = {key: {n for n in names if n == key or n.startswith(key + "_")} for key in _HEALTH}
    health = {title: f"^epoch_{key}(_.*)?$" for key, title in _HEALTH.items() if families[key]}
    rest = names.difference(_SCALING, *families.values())
    training = {
        name: f"^epoch_{re.escape(name)}$"
        for name in sorted(rest, key=lambda name: (name != "loss", name))
    }
    return {"Training": training, "Scaling": scaling, "Health": health}


def dashboards_summary(names):
    """Returns a serialized summary that makes TensorBoard show `dashboards(names)`."""
    # Imported here: only who writes dashboards waits for TensorBoard.
    from tensorboard.plugins.custom_scalar import layout_pb2, summary

    layout = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title=title,
                chart=[
                    layout_pb2.Chart(
                        title=chart, multiline=layout_pb2.MultilineChartContent(tag=[tags])
                    )
                    for chart, tags in charts.items()
                ],
            )
            for title, charts in dashboards(names).items()
            if charts
        ]
    )
    return summary.pb(layout).SerializeToString()
