"""Ratios, a table, a JSON file and pictures of what was measured.

figures = [Figure("mlp", 2, "fit", "steps/s", {"ours": [...], "keras": [...]}), ...]
print(table(figures))
"""

import dataclasses
import json
import os
import platform
import statistics
from pathlib import Path

# Who is compared with whom: the loop by hand runs a fixed number of steps a call, and so do we.
PAIRS = (("ours", "keras"), ("ours_fixed", "bare_loop"), ("ours_fixed", "orbit"))


@dataclasses.dataclass(frozen=True)
class Figure:
    """One figure of every contender, a value per round.

    Args:
        model: Name of the case.
        replicas: Number of replicas.
        name: "fit", "evaluate", "predict", "first step" or "memory".
        unit: "steps/s", "s" or "MB".
        values: Dict of a list of values by contender.
    """

    model: str
    replicas: int
    name: str
    unit: str
    values: dict

    def ratio(self, ours, rival):
        """Returns `(min, median, max)` of ours / rival over rounds, or None."""
        if not self.values.get(ours) or not self.values.get(rival):
            return None
        ratios = [a / b for a, b in zip(self.values[ours], self.values[rival], strict=True)]
        return min(ratios), statistics.median(ratios), max(ratios)


def machine():
    """Returns what the figures depend on."""
    import keras
    import tensorflow as tf

    details = tf.config.experimental.get_device_details
    gpus = [details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [gpu.get("device_name", "GPU") for gpu in gpus],
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "load": os.getloadavg()[0],
    }


def _processor():
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(figures):
    """Returns a Markdown table: medians, and ratios as median (min to max)."""
    names = list(dict.fromkeys(name for figure in figures for name in figure.values))
    pairs = [pair for pair in PAIRS if any(figure.ratio(*pair) for figure in figures)]
    heads = ["model", "replicas", "figure", *names, *(f"{a} / {b}" for a, b in pairs)]
    rows = [heads, ["---"] * len(heads)]
    for figure in figures:
        rows.append(
            [figure.model, str(figure.replicas), f"{figure.name}, {figure.unit}"]
            + [_median(figure.values.get(name)) for name in names]
            + [_interval(figure.ratio(*pair)) for pair in pairs]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    rows[1] = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def _median(values):
    if not values:
        return ""
    value = statistics.median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _interval(ratio):
    return "" if ratio is None else f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})"


def write_json(path, figures, notes, about):
    """Writes everything that was measured."""
    content = {
        "machine": about,
        "notes": notes,
        "figures": [
            {
                **dataclasses.asdict(figure),
                "ratios": {
                    f"{a}/{b}": dict(zip(("min", "median", "max"), figure.ratio(a, b), strict=True))
                    for a, b in PAIRS
                    if figure.ratio(a, b)
                },
            }
            for figure in figures
        ],
    }
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_plots(folder, figures, about):
    """Writes one picture per kind of figure; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{about['processor']}, {about['cores']} cores, TensorFlow {about['tensorflow']}"
    paths = []
    for name in dict.fromkeys(figure.name for figure in figures):
        chosen = [figure for figure in figures if figure.name == name]
        path = folder / f"{name.replace(' ', '_')}.png"
        (_plot_growth if name == "tracing" else _plot_ratios)(path, chosen, title)
        paths.append(path)
    return paths


def _plot_ratios(path, figures, title):
    """Ours over each rival: the median as a bar, the rounds' interval as a line."""
    from matplotlib import pyplot

    pairs = [pair for pair in PAIRS if any(figure.ratio(*pair) for figure in figures)]
    if not pairs:
        pairs = [("ours", "keras")]
    width = 0.8 / len(pairs)
    picture, axes = pyplot.subplots(figsize=(max(6, 1.3 * len(figures)), 4), layout="constrained")
    for number, (ours, rival) in enumerate(pairs):
        places, medians, errors = [], [], ([], [])
        for place, figure in enumerate(figures):
            ratio = figure.ratio(ours, rival)
            if ratio is None:
                continue
            places.append(place + number * width)
            medians.append(ratio[1])
            errors[0].append(ratio[1] - ratio[0])
            errors[1].append(ratio[2] - ratio[1])
        axes.bar(places, medians, width, yerr=errors, capsize=2, label=f"{ours} / {rival}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(figures))],
        [f"{figure.model}\n{figure.replicas} replica(s)" for figure in figures],
    )
    axes.set_ylabel(f"ratio of {figures[0].unit}")
    axes.set_title(f"{figures[0].name}\n{title}", fontsize=9)
    axes.legend(fontsize=8)
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


def _plot_growth(path, figures, title):
    """Time to the first step over the number of replicas."""
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for model in dict.fromkeys(figure.model for figure in figures):
        for name in dict.fromkeys(name for figure in figures for name in figure.values):
            points = [
                (figure.replicas, statistics.median(figure.values[name]))
                for figure in figures
                if figure.model == model and figure.values.get(name)
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{model}, {name}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("replicas")
    axes.set_ylabel("seconds to the first step")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
