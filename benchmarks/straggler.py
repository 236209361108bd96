"""One worker of three is four times slower: `python -m benchmarks.straggler --json out.json`.

A step waits, without using the processor, for the time that its worker needs, and then makes a
small update. So the figures are those of workers that have processors of their own, whatever else
this machine does; chief, workers, server and messages are real processes. Three figures, in order:

* each worker alone with the server: what the workers can do is the sum;
* all workers with the server, asynchronously;
* all workers in step with each other, without a server.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

import keras_replicator as kr
from benchmarks import report
from keras_replicator.launch import launch

ROOT = Path(__file__).resolve().parent.parent
SECONDS = (0.2, 0.2, 0.8)
ROWS = 8  # of a step of one worker
ASKED = 0.85


def run_job(seconds, servers, steps):
    """Runs one job and returns what its chief measured.

    Args:
        seconds: Seconds of a step of each worker.
        servers: Number of parameter servers; 0 trains synchronously.
        steps: Steps that are measured.

    Raises:
        RuntimeError: When the job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = {"seconds": list(seconds), "steps": steps, "result": f"{folder}/result.json"}
        with open(Path(folder) / "log", "w+", encoding="utf-8") as log:
            code = launch(
                [sys.executable, "-m", "benchmarks.straggler", "--task", json.dumps(task)],
                workers=len(seconds),
                parameter_servers=servers,
                environ={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
                output=log,
                error=log,
            )
            if code:
                log.seek(0)
                raise RuntimeError(
                    f"A job ended with code {code}. Received: {task}\n{log.read()[-3000:]}"
                )
        return json.loads(Path(task["result"]).read_text(encoding="utf-8"))


def measure(seconds, steps):
    """Returns a dict of rows per second: each worker alone, asynchronous, synchronous.

    Args:
        seconds: Seconds of a step of each worker.
        steps: Steps of the job of all workers.
    """
    rates = {}
    for each in dict.fromkeys(seconds):
        rates[each] = run_job([each], 1, max(4, round(8 / each)))["rows_per_second"]
        print(f"a worker with {each} s a step, alone: {rates[each]:.1f} rows/s", flush=True)
    alone = [rates[each] for each in seconds]
    found = {"seconds": list(seconds), "alone": alone}
    for name, servers, number in (
        ("asynchronous", 1, steps),
        ("synchronous", 0, max(4, round(8 / max(seconds)))),
    ):
        found[name] = run_job(seconds, servers, number)
        found[name]["share"] = share = found[name]["rows_per_second"] / sum(alone)
        rate = found[name]["rows_per_second"]
        print(f"{name}: {rate:.1f} rows/s, {share:.2f} of what the workers can do", flush=True)
    return found


def train(task):
    """What each process does: a short run, then one that is measured."""

    def input_fn(context):
        wait_for = task["seconds"][context.input_pipeline_id]
        batch = (tf.ones((ROWS, 16)), tf.ones((ROWS, 1)), tf.fill((ROWS,), wait_for))
        return tf.data.Dataset.from_tensors(batch).repeat()

    def train_step(model, batch):
        x, y, wait_for = batch
        waited = wait(wait_for[0])
        with tf.control_dependencies([waited]), tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def build():
        return keras.Sequential([keras.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(1)])

    trainer = kr.ReplicatedTrainer(build, train_step=train_step)
    trainer.compile(optimizer="sgd")
    for steps in (2 * len(task["seconds"]), task["steps"]):
        history = trainer.fit(
            input_fn, steps_per_epoch=steps, verbose=0, callbacks=[kr.callbacks.Throughput()]
        ).history
    records = trainer.step_records[-task["steps"] :]
    found = {
        "rows_per_second": history["rows_per_second"][0],
        "steps": task["steps"],
        "staleness_mean": sum(r.staleness for r in records) / max(1, len(records)),
        "staleness_max": max((r.staleness for r in records), default=0),
        "records": [
            [r.worker, round(r.begun - records[0].begun, 3), round(r.ended - r.begun, 3)]
            for r in records
        ],
    }
    if trainer.plan.is_chief:
        Path(task["result"]).write_text(json.dumps(found), encoding="utf-8")


def wait(seconds):
    """Waits inside of a compiled step, on a worker that runs a function of the chief's."""
    one = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=[[]])
    # It sleeps twice: before the element, and before it says that there is no other.
    slow = tf.raw_ops.SleepDataset(
        input_dataset=one,
        sleep_microseconds=tf.cast(seconds * 0.5e6, tf.int64),
        output_types=[tf.int32],
        output_shapes=[[]],
    )
    return tf.raw_ops.DatasetToSingleElement(
        dataset=slow, output_types=[tf.int32], output_shapes=[[]]
    )[0]


def write_plot(folder, found, about):
    """Writes straggler.png and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(folder) / "straggler.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture, (bars, times) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    bottom, workers = 0.0, [f"worker {n}" for n in range(len(found["alone"]))]
    for name, rate in zip(workers, found["alone"], strict=True):
        bars.bar("what the workers\ncan do", rate, bottom=bottom, label=name)
        bottom += rate
    for name in ("asynchronous", "synchronous"):
        height = found[name]["rows_per_second"]
        bars.bar(name, height, color="gray")
        bars.text(name, height, f"{found[name]['share']:.0%}", ha="center", va="bottom")
    bars.set_ylabel("rows per second")
    bars.legend(fontsize=8)
    for worker, begun, seconds in found["asynchronous"]["records"]:
        if begun < 6:
            times.barh(worker, seconds, left=begun, color=f"C{worker}", edgecolor="white")
    times.set_yticks(range(len(workers)), workers)
    times.set_xlabel("seconds; each bar is a step")
    times.set_title("asynchronous", fontsize=9)
    picture.suptitle(
        f"Steps wait for {', '.join(map(str, found['seconds']))} s; {about['cores']} cores, "
        f"TensorFlow {about['tensorflow']}",
        fontsize=9,
    )
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
    return path


def main(arguments=None):
    """Measures, prints the shares and writes what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.straggler", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=SECONDS, help="of a step of each worker"
    )
    parser.add_argument("--steps", type=int, default=240, help="steps that are measured")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--plots", help="folder to write a PNG file to")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task is not None:
        return train(json.loads(options.task))
    found = measure(options.seconds, options.steps)
    verdict = "met" if found["asynchronous"]["share"] >= ASKED else "MISSED"
    print(f"{ASKED:.2f} asked: {verdict}")
    about = report.machine()
    if options.json:
        content = {"machine": about, **found}
        Path(options.json).write_text(json.dumps(content) + "\n", encoding="utf-8")
    if options.plots:
        print(write_plot(options.plots, found, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
