"""Measures contenders side by side, each number of replicas in a process of its own.

    run_child({"task": "throughput", "case": "mlp", "replicas": 2, "rounds": 7, ...})
    run_child({"task": "fresh", "case": "mlp", "replicas": 2, "contender": "keras", ...})

Other programs slow a machine down for seconds at a time, so contenders take turns, each round
begins with another one, and what counts is the ratio within a round.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = "benchmark-result "
PHASES = ("fit", "evaluate", "predict")


def run_child(task):
    """Runs a task in a new process and returns its result.

    Raises:
        RuntimeError: When the process fails; the message ends with what it printed last.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measure", json.dumps(task)],
        cwd=ROOT,
        env={"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", **os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return json.loads(line[len(RESULT) :])
    raise RuntimeError(
        f"A benchmark failed with exit code {done.returncode}. Received: {task}\n"
        + done.stderr[-3000:]
    )


def throughput(case, replicas, names, rounds, steps=None, epochs=3, phases=PHASES):
    """Returns `{figure: {contender: [a value per round]}}`.

    Figures are the phases (steps per second), and "<phase>, processor": milliseconds of all
    threads per step, which other programs disturb less. The first epoch of each `fit` is not
    counted: it starts the input pipeline.
    """
    from benchmarks.contenders import make

    data = case.make_data(steps)
    contenders = {name: make(name, case, replicas, data) for name in names}
    result = {}
    for phase in phases:
        if phase != "fit" and not case.evaluates:
            continue
        taking_part = [name for name in names if phase == "fit" or contenders[name].evaluates]
        speeds = {name: [] for name in taking_part}
        costs = {name: [] for name in taking_part}
        for number in range(-1, rounds):  # round -1 traces and warms up
            first = number % len(taking_part)
            for name in taking_part[first:] + taking_part[:first]:
                speed, cost = _speed(contenders[name], phase, epochs)
                if number >= 0:
                    speeds[name].append(speed)
                    costs[name].append(cost)
        result[phase], result[f"{phase}, processor"] = speeds, costs
    return result


def _speed(contender, phase, epochs):
    """Returns `(steps per second, milliseconds of processor time per step)`."""
    begun, used = time.perf_counter(), time.process_time()
    if phase == "fit":
        seconds = statistics.mean(contender.fit(epochs)[1:])
    else:
        epochs = 1
        getattr(contender, phase)()
        seconds = time.perf_counter() - begun
    used = time.process_time() - used
    return contender.steps / seconds, 1e3 * used / (epochs * contender.steps)


def fresh(case, replicas, name, steps=None, epochs=2):
    """Returns what only a new process can tell: time to the first step, and peak memory."""
    from benchmarks.contenders import make

    data = case.make_data(steps)
    start = time.perf_counter()
    contender = make(name, case, replicas, data)
    first_step = contender.first_step() - start
    if epochs:
        contender.fit(epochs)
    return {"first_step": first_step, "memory": peak_memory()}


def peak_memory():
    """Returns the largest resident memory of this process in MB."""
    # Not getrusage: its maximum includes the parent's memory at the time of the fork.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _run(task):
    import keras_replicator as kr
    from benchmarks.models import CASES

    kr.simulate_devices(task["replicas"])
    options = {key: value for key, value in task.items() if key not in ("task", "case")}
    function = {"throughput": throughput, "fresh": fresh}[task["task"]]
    return function(CASES[task["case"]], **options)


if __name__ == "__main__":
    print(RESULT + json.dumps(_run(json.loads(sys.argv[1]))), flush=True)
