"""One run that is killed again and again, by SIGKILL at random moments, and goes on each time.

    python -m tests.crashes FOLDER --kills 20 --devices 4 --data tf.data
    python -m keras_replicator launch --workers 2 --max-restarts 2 tests/crashes.py FOLDER --once …

The first line runs the unbroken run, then the other one, each start in a process of its own. With
`--once` this process is one start. The run shuffles, has dropout, momentum, BatchNormalization,
EarlyStopping and a partial last batch; each start notes which rows its steps used.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_replicator as kr  # noqa: E402

ROWS, BATCH, EPOCHS = 151, 16, 14  # ten steps an epoch, the last one with 7 rows
STEPS = -(-ROWS // BATCH)


def data():
    """x, whose first column is the number of its row, and y."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 5)).astype("float32")
    y = x[:, 1:2] - x[:, 2:3] + 0.1 * generator.normal(size=(ROWS, 1)).astype("float32")
    x[:, 0] = np.arange(ROWS)
    return x, y


class NotesRows(keras.layers.Layer):
    """Takes the first column off; in training it writes it to a file, with the current step."""

    step = None
    file = None

    def call(self, x, training=False):
        if not training or isinstance(x, keras.KerasTensor):
            return x[:, 1:]
        note = tf.numpy_function(self.note, [x[:, 0]], tf.int32)
        with tf.control_dependencies([note]):
            return tf.identity(x[:, 1:])

    @classmethod
    def note(cls, rows):
        line = " ".join(map(str, [cls.step, *rows.astype(int)]))
        os.write(cls.file, f"{line}\n".encode())
        return np.int32(0)


class Steps(keras.callbacks.Callback):
    """Tells the layer the step, and does something after a number of steps of this start.

    Args:
        after: Steps, or None.
        act: Function without arguments.
    """

    def __init__(self, after=None, act=None):
        super().__init__()
        self.after, self.act = after, act

    def get_state(self):
        return {}

    def set_state(self, state):
        """Each start counts its own steps."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        NotesRows.step = self.epoch * STEPS + batch

    def on_train_batch_end(self, batch, logs=None):
        if self.after is not None:
            self.after -= 1
            if self.after == 0:
                self.act()


def build():
    return keras.Sequential(
        [
            keras.Input((5,)),
            NotesRows(),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.2),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def train(folder, start, kind="arrays", devices=None, steps=None):
    """Trains one start of the run in `folder`, to its end or to its death.

    Args:
        folder: Folder of the run.
        start: Number of the start.
        kind: "arrays" or "tf.data".
        devices: As in the trainer.
        steps: A `Steps`, or None.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = kr.ReplicatedTrainer(build, seed=3, devices=devices, peer_timeout=20)
    name = f"rows-{start:02}-{trainer.plan.worker}.log"
    NotesRows.file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    trainer.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    given = data()
    if kind == "tf.data":
        rows = tf.data.Dataset.from_tensor_slices(given).shuffle(40, seed=5)
        given = (rows.batch(BATCH),)
    history = trainer.fit(
        *given,
        batch_size=BATCH if kind == "arrays" else None,
        epochs=EPOCHS,
        verbose=0,
        resume="auto",
        callbacks=[
            keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
            steps or Steps(),
            kr.callbacks.Checkpoint(folder / "checkpoints", every="3 steps"),
        ],
    ).history
    if trainer.plan.is_chief:
        np.savez(folder / "weights.npz", *trainer.model.get_weights())
        (folder / "history.json").write_text(json.dumps(history))


def results(folder):
    """(weights, history, rows of each epoch in the chain of updates that led to them)."""
    folder = Path(folder)
    with np.load(folder / "weights.npz") as file:
        weights = [file[name] for name in file.files]
    history = json.loads((folder / "history.json").read_text())
    steps = {}  # step -> (start, rows); what a later start did again replaces what was lost
    for path in sorted(folder.glob("rows-*.log")):
        start = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            step, *rows = map(int, line.split())
            if steps.get(step, (-1,))[0] < start:
                steps[step] = (start, [])
            steps[step][1].extend(rows)
    epochs = {}
    for step, (_, rows) in sorted(steps.items()):
        epochs.setdefault(step // STEPS, []).extend(rows)
    return weights, history, epochs


def check(crashed, unbroken):
    """Fails unless both runs end in the same bits, and use each row once in each epoch."""
    weights, history, epochs = results(crashed)
    expected_weights, expected_history, expected_epochs = results(unbroken)
    assert history == expected_history
    for actual, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert list(epochs) == list(range(len(history["loss"])))
    for epoch, rows in epochs.items():
        assert sorted(rows) == list(range(ROWS)), f"rows of epoch {epoch}"
        assert rows != sorted(rows)
    assert {epoch: sorted(rows) for epoch, rows in expected_epochs.items()} == {
        epoch: sorted(rows) for epoch, rows in epochs.items()
    }


# ---------------------------------------------------------------------------------- processes


def end_after(folder, start, worker, workers, fates, seed):
    """The `Steps` that ends this start of this worker, as `fates` has it.

    Args:
        folder: Folder of the run, where the end is noted.
        start: Number of the start.
        worker: Number of this worker.
        workers: Workers of the job.
        fates: For each start "kill" or "terminate"; later ones live.
        seed: Seed of the moments.
    """
    if start >= len(fates):
        return Steps()
    draw = random.Random(f"{seed}/{start}")
    after, delay, victim = draw.randint(1, 8), draw.uniform(0, 0.05), draw.randrange(workers)
    if worker != victim:
        return Steps()

    def note():
        with open(Path(folder) / "ends.log", "a") as file:
            file.write(f"{start} {worker} {fates[start]}\n")

    def end():
        note()
        if fates[start] == "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            # In the middle of a later step, or of writing a checkpoint.
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return Steps(after, end)


def one_start(folder, start, arguments, fates):
    """What one process does; notes the code with which it leaves."""
    worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    if arguments.devices > 1:
        kr.simulate_devices(arguments.devices)
    steps = end_after(folder, start, worker, arguments.workers, fates, arguments.seed)
    begun = time.monotonic()
    try:
        train(folder, start, arguments.data, steps=steps)
    except SystemExit as left:
        print(f"start {start}, worker {worker} leaves with {left.code}", flush=True)
        raise
    finally:
        print(f"start {start}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


def forked(run):
    """Runs a function in a process of its own; returns its number."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        run()
        code = 0
    except SystemExit as left:
        code = left.code
    finally:
        sys.stdout.flush()
        os._exit(code)


def start_all(folder, start, arguments, fates):
    """One start of every worker; returns their exit codes (negative: the signal's number)."""
    from tests.multiworker.jobs import configurations

    several = arguments.workers > 1
    configs = configurations({"worker": arguments.workers}) if several else [None]
    numbers = []
    for config in configs:

        def run(config=config):
            if config is not None:
                os.environ["TF_CONFIG"] = config
            one_start(folder, start, arguments, fates)

        numbers.append(forked(run))
    try:
        return [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers]
    except BaseException:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        raise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default="arrays", choices=["arrays", "tf.data"])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--fates", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    if arguments.once:
        start = int(os.environ.get("KERAS_REPLICATOR_RESTART", "0"))
        one_start(arguments.folder, start, arguments, arguments.fates)
        return
    codes = start_all(arguments.folder / "unbroken", 0, arguments, [])
    assert not any(codes), codes
    fates, start = ["kill"] * arguments.kills, 0
    while any(codes := start_all(arguments.folder / "crashed", start, arguments, fates)):
        print(f"start {start} ended with {codes}", flush=True)
        start += 1
        assert start <= arguments.kills
    check(arguments.folder / "crashed", arguments.folder / "unbroken")
    ends = (arguments.folder / "crashed" / "ends.log").read_text().splitlines()
    print(f"killed {len(ends)} times; the same bits, and every row once in each epoch")


if __name__ == "__main__":
    main()
