"""Weak scaling over processes: `python -m benchmarks.weak_scaling --rounds 5 --json out.json`.

Workers that train one model together, each pinned to a core of its own, beside as many processes
that train alone, pinned to the same cores and running at the same time: cores of one machine slow
each other down, so a single process would be no fair yardstick. All processes live through the
whole benchmark and take turns, and what counts is the ratio within a round.
"""

import argparse
import json
import os
import socket
import statistics
import sys
from pathlib import Path

from benchmarks.turns import Process, serve, turn

ASKED = 0.90


def measure(options, cores, folder):
    """Returns `{"together": [...], "apart": [...]}`, steps per second of each round."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(cores))]
    configs = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        for index in range(len(cores))
    ]
    with open(folder / "weak_scaling.log", "w", encoding="utf-8") as log:
        groups = {"together": [], "apart": []}
        try:
            for core, config in zip(cores, configs, strict=True):
                groups["together"].append(_process(core, options, json.dumps(config), log))
                groups["apart"].append(_process(core, options, None, log))
            for name in groups:
                turn(groups[name])  # traces and warms up
            speeds = {name: [] for name in groups}
            for number in range(options.rounds):
                for name in sorted(groups, reverse=number % 2 == 1):
                    speeds[name].append(options.steps / turn(groups[name]))
        finally:
            for process in groups["together"] + groups["apart"]:
                process.end()
    return speeds


def _process(core, options, config, log):
    """A process on one core; `config` is its TF_CONFIG, None where it trains alone."""
    words = ["--core", core, "--case", options.case, "--steps", options.steps]
    return Process("benchmarks.weak_scaling", words, {"TF_CONFIG": config}, log)


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def train(case, steps):
    """What each process does: trains for a turn with every line of its input."""
    import keras

    import keras_replicator as kr
    from benchmarks.models import CASES

    case = CASES[case]
    trainer = kr.ReplicatedTrainer(case.build, seed=0)
    trainer.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss=case.make_loss())
    x, y = case.make_data(steps * trainer.num_replicas)
    batch_size = case.batch_size * trainer.num_replicas
    serve(lambda: trainer.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0))


def main(arguments=None):
    """Measures, prints the result and writes what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weak_scaling", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--case", default="resnet20", help="a model of benchmarks/models.py")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="steps of a turn")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--logs", default=".", help="folder for the log of the processes")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.core is not None:
        os.sched_setaffinity(0, [options.core])
        return train(options.case, options.steps)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < options.workers:
        parser.error(
            f"each worker needs a core of its own. Received: --workers {options.workers}, with "
            f"{len(cores)} cores"
        )
    speeds = measure(options, cores[: options.workers], Path(options.logs))
    ratios = [a / b for a, b in zip(speeds["together"], speeds["apart"], strict=True)]
    for name, values in speeds.items():
        print(f"{options.case}, {options.workers} processes {name}: ", end="")
        print(", ".join(f"{value:.2f}" for value in values), "steps/s")
    median = statistics.median(ratios)
    verdict = "met" if median >= ASKED else "MISSED"
    print(
        f"together / apart: {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
        f"{ASKED:.2f} asked: {verdict}"
    )
    if options.json:
        content = {"case": options.case, "workers": options.workers, **speeds, "ratios": ratios}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
