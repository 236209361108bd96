"""The command line: `python -m benchmarks --only mlp --rounds 7 --json out.json --plots images`."""

import argparse
import sys

from benchmarks import report, targets
from benchmarks.contenders import available
from benchmarks.measure import PHASES, run_child
from benchmarks.models import CASES

TRACING = "tracing"
TRACED = ("small_mlp", "many_variables")
TRACED_REPLICAS = (1, 2, 4, 8, 16, 32, 64)


def parse(arguments=None):
    """Returns the parsed command line."""
    models = [name for name, case in CASES.items() if case.replicas]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*models, TRACING], default=models)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replicas", type=int, nargs="+", help="default: those of each model")
    parser.add_argument("--figures", nargs="+", choices=[*PHASES, "fresh"], default=None)
    parser.add_argument("--contenders", nargs="+", help="default: all that can run")
    parser.add_argument("--steps", type=int, help="steps of an epoch; default: the model's")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--plots", help="folder to write PNG files to")
    return parser.parse_args(arguments)


def measure(options, say=print):
    """Returns `(figures, notes)`."""
    figures, notes = [], []
    for model in options.only:
        if model == TRACING:
            figures += _tracing(options, say)
            continue
        for replicas in options.replicas or CASES[model].replicas:
            names, why_not = available(replicas)
            names = [n for n in names if n in (options.contenders or names)]
            notes += [note for note in why_not if note not in notes]
            say(f"{model}, {replicas} replica(s): {', '.join(names)}")
            new = _throughput(model, replicas, names, options)
            if options.figures is None or "fresh" in options.figures:
                new += _fresh(model, replicas, names, options)
            say(report.table(new) + "\n")
            figures += new
    return figures, notes


def _throughput(model, replicas, names, options):
    phases = [phase for phase in PHASES if options.figures is None or phase in options.figures]
    if not phases:
        return []
    speeds = run_child(
        {
            "task": "throughput",
            "case": model,
            "replicas": replicas,
            "names": names,
            "rounds": options.rounds,
            "steps": options.steps,
            "phases": phases,
            "epochs": 3 if CASES[model].evaluates else 2,
        }
    )
    return [
        report.Figure(
            model, replicas, name, "ms/step" if name.endswith("processor") else "steps/s", values
        )
        for name, values in speeds.items()
    ]


def _fresh(model, replicas, names, options, epochs=2, name="first step"):
    seconds, megabytes = {}, {}
    # How many steps a call runs matters to neither figure.
    names = [n for n in names if n not in ("ours_fixed", "keras_tuned")]
    for number in range(max(1, options.rounds // 2)):
        first = number % max(1, len(names))
        for contender in names[first:] + names[:first]:
            result = run_child(
                {
                    "task": "fresh",
                    "case": model,
                    "replicas": replicas,
                    "name": contender,
                    "steps": options.steps,
                    "epochs": epochs,
                }
            )
            seconds.setdefault(contender, []).append(result["first_step"])
            megabytes.setdefault(contender, []).append(result["memory"])
    figures = [report.Figure(model, replicas, name, "s", seconds)]
    if epochs:
        figures.append(report.Figure(model, replicas, "memory", "MB", megabytes))
    return figures


def _tracing(options, say):
    """How time to the first step grows with the number of replicas."""
    figures = []
    for model in TRACED:
        for replicas in options.replicas or TRACED_REPLICAS:
            names = [n for n in ("ours", "keras") if n in (options.contenders or (n,))]
            figures += _fresh(model, replicas, names, options, epochs=0, name=TRACING)
            say(report.table(figures[-1:]))
    return figures


def main(arguments=None):
    """Measures, prints the table and writes what was asked for."""
    options = parse(arguments)
    figures, notes = measure(options)
    about = report.machine()
    print(", ".join(f"{name}: {value}" for name, value in about.items()))
    for note in notes:
        print(f"left out, {note}")
    print(report.table(figures))
    for line in targets.check(figures):
        print(line)
    if options.json:
        report.write_json(options.json, figures, notes, about)
    if options.plots:
        for path in report.write_plots(options.plots, figures, about):
            print(path)


if __name__ == "__main__":
    sys.exit(main())
