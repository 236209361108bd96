"""A mesh beside a DTensor loop by hand: `python -m benchmarks.mesh --rounds 7 --json out.json`.

The same model, split in the same way over a mesh of 2 x 2 simulated CPUs, is trained by this
package and by a loop of one's own on `tf.experimental.dtensor`; and on 4 replicas without a mesh.
The loop by hand has one step a call; the package chooses, and is once more held to one step. Each
has a process of its own. They take turns, each round begins with another one, and what counts is
the ratio within a round. A turn of the package is the second epoch of a `fit`, since the loop by
hand has its data at hand.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path

from benchmarks.turns import Process, serve, turn

ASKED = 0.95
MESH = {"batch": 2, "model": 2}
DEVICES = 4
RIVALS = ("by_hand", "one_a_call", "mirrored")
# The package switches this pass off, see docs/architecture.md; a loop by hand has it.
_ENVIRONMENT = {"by_hand": {"DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION": "1"}}


def ours(case, x, y, layout=MESH, steps_per_execution="auto"):
    """Returns a function that trains on a mesh, or without one on replicas.

    It returns the seconds of its second epoch.
    """
    import keras

    import keras_replicator as kr
    from benchmarks.contenders import EpochClock

    trainer = kr.ReplicatedTrainer(
        case.build,
        devices=DEVICES,
        layout=None if layout is None else kr.Layout(layout, "auto"),
    )
    trainer.compile(
        optimizer=keras.optimizers.Adam(),
        loss=case.make_loss(),
        steps_per_execution=steps_per_execution,
    )

    def train():
        clock = EpochClock()
        trainer.fit(x, y, batch_size=case.batch_size, epochs=2, verbose=0, callbacks=[clock])
        return float(clock.seconds[1])

    return train


def one_a_call(case, x, y):
    """Returns a function that trains on a mesh with one step a call."""
    return ours(case, x, y, steps_per_execution=1)


def mirrored(case, x, y):
    """Returns a function that trains on 4 replicas (MirroredStrategy)."""
    return ours(case, x, y, layout=None)


class ByHand:
    """What one writes on `tf.experimental.dtensor` for a Keras model.

    Args:
        case: A `models.Case`.
        x: Inputs of an epoch.
        y: Targets.
    """

    def __init__(self, case, x, y):
        import keras
        import tensorflow as tf

        import keras_replicator as kr
        from benchmarks.contenders import batches

        self._tf, self._dtensor = tf, tf.experimental.dtensor
        self._mesh = self._dtensor.create_mesh(
            list(MESH.items()), devices=[f"CPU:{number}" for number in range(DEVICES)]
        )
        self._model = case.build()
        self._loss = case.make_loss()
        self._optimizer = keras.optimizers.Adam()
        layout = kr.auto_layout(self._model, MESH)
        weights = self._model.variables
        self._place(weights, [layout.of(v.path, v.shape) for v in weights])
        # An optimizer knows variables by what they hold when it is built.
        self._optimizer.build(self._model.trainable_variables)
        # Weights of one shape are split alike in the models of this benchmark.
        axes = {tuple(v.shape): layout.of(v.path, v.shape) for v in weights}
        slots = self._optimizer.variables
        self._place(slots, [axes.get(tuple(v.shape), ()) for v in slots])
        self._total = self._variable(0.0, ())
        self._steps = len(y) // case.batch_size
        self._iterator = iter(batches(x, y, case.batch_size))
        self._step = tf.function(self._step)

    def _place(self, variables, splits):
        from keras_replicator import compat

        for variable, axes in zip(variables, splits, strict=True):
            value = compat.raw_variable(variable).read_value()
            compat.set_raw_variable(variable, self._variable(value, axes))

    def _layout(self, axes):
        if not axes:
            return self._dtensor.Layout.replicated(self._mesh, 0)
        names = [self._dtensor.UNSHARDED if axis is None else axis for axis in axes]
        return self._dtensor.Layout(names, self._mesh)

    def _variable(self, value, axes):
        whole = self._dtensor.copy_to_mesh(value, self._layout((None,) * len(axes)))
        return self._dtensor.DVariable(self._dtensor.relayout(whole, self._layout(axes)))

    def _packed(self, tensor):
        """A batch whose rows are split over "batch"; both devices of a row have the same."""
        parts = self._tf.split(tensor, MESH["batch"])
        located = [part for part in parts for _ in range(MESH["model"])]
        return self._dtensor.pack(
            located, self._layout(("batch",) + (None,) * (len(tensor.shape) - 1))
        )

    def _step(self, x, y):
        tf = self._tf
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        variables = self._model.trainable_variables
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
        self._optimizer.apply_gradients(zip(gradients, variables))
        self._total.assign_add(loss)

    def __call__(self):
        """Trains for an epoch and reads its mean loss; returns the seconds."""
        begun = time.perf_counter()
        on_mesh = functools.partial(self._dtensor.default_mesh, self._mesh)
        with on_mesh():
            self._total.assign(self._tf.zeros(()))
        for _ in range(self._steps):
            # The iterator itself is not on the mesh.
            x, y = (self._packed(part) for part in next(self._iterator))
            with on_mesh():
                self._step(x, y)
        with on_mesh():
            self.loss = float(self._dtensor.unpack(self._total.read_value())[0]) / self._steps
        return time.perf_counter() - begun


CONTENDERS = {"ours": ours, "one_a_call": one_a_call, "by_hand": ByHand, "mirrored": mirrored}


def train(name, case, steps):
    """What each process does."""
    import keras_replicator as kr
    from benchmarks.models import CASES

    kr.simulate_devices(DEVICES)
    case = CASES[case]
    serve(CONTENDERS[name](case, *case.make_data(steps)))


def measure(options):
    """Returns `{contender: [steps per second of each round]}`."""
    names = list(CONTENDERS)
    with open(Path(options.logs) / "mesh.log", "w", encoding="utf-8") as log:
        processes = {}
        try:
            for name in names:
                words = ["--contender", name, "--case", options.case, "--steps", options.steps]
                environ = _ENVIRONMENT.get(name, {})
                processes[name] = Process("benchmarks.mesh", words, environ, log)
            for process in processes.values():
                turn([process])  # traces and warms up
            speeds = {name: [] for name in names}
            for number in range(options.rounds):
                first = number % len(names)
                for name in names[first:] + names[:first]:
                    speeds[name].append(options.steps / turn([processes[name]]))
        finally:
            for process in processes.values():
                process.end()
    return speeds


def main(arguments=None):
    """Measures, prints the result and writes what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mesh", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--case", default="mlp", help="a model of benchmarks/models.py")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="steps of a turn")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--logs", default=".", help="folder for the log of the processes")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender is not None:
        return train(options.contender, options.case, options.steps)
    speeds = measure(options)
    for name, values in speeds.items():
        print(f"{options.case}, {name}: {', '.join(f'{value:.1f}' for value in values)} steps/s")
    ratios = {
        name: [a / b for a, b in zip(speeds["ours"], speeds[name], strict=True)] for name in RIVALS
    }
    for name, values in ratios.items():
        median = statistics.median(values)
        verdict = f", {ASKED:.2f} asked: {'met' if median >= ASKED else 'MISSED'}"
        print(
            f"ours / {name}: {median:.2f} ({min(values):.2f} to {max(values):.2f})"
            + (verdict if name == "by_hand" else "")
        )
    if options.json:
        content = {"case": options.case, "speeds": speeds, "ratios": ratios}
        Path(options.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
