"""What checkpoints cost: `python -m benchmarks.checkpoints`.

Two figures, each with what is asked of it:

* seconds to save a model of 100 BatchNormalization layers from 4 replicas, over those from 1:
  at most 1.5;
* throughput of ResNet-20 with a checkpoint each 100 steps, over that without: at least 0.97.

The variants take turns, and each round begins with another one; what counts is the median of the
rounds' ratios.
"""

import argparse
import statistics
import sys
import tempfile
import time

import keras

import keras_replicator as kr
from benchmarks.contenders import EpochClock
from benchmarks.models import CASES

BATCH_SIZE = 32
STEPS = 200


def normalized(layers=100):
    """A model of so many BatchNormalization layers."""
    stack = [keras.Input((32,))]
    for _ in range(layers):
        stack += [keras.layers.Dense(32, use_bias=False), keras.layers.BatchNormalization()]
    return keras.Sequential([*stack, keras.layers.Dense(1)])


def saving(rounds, replicas=(1, 4)):
    """Returns `{replicas: [seconds of a save per round]}`, writing included."""
    trainers = {}
    for count in replicas:
        trainers[count] = kr.ReplicatedTrainer(normalized, devices=count)
        trainers[count].compile("adam", "mse")
        x = keras.random.normal((8, 32), seed=1)
        trainers[count].fit(x, x[:, :1], batch_size=8, verbose=0)
    seconds = {count: [] for count in replicas}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, rounds):
            for count in replicas if number % 2 else reversed(replicas):
                started = time.perf_counter()
                trainers[count].save_checkpoint(f"{folder}/{count}", keep=1)
                if number >= 0:
                    seconds[count].append(time.perf_counter() - started)
    return seconds


def throughput(rounds, every="100 steps"):
    """Returns `{variant: [steps per second per round]}` of ResNet-20 with and without."""
    case = CASES["resnet20"]
    x = case.make_rows(BATCH_SIZE * STEPS)
    y = keras.ops.convert_to_numpy(keras.random.randint((len(x),), 0, case.classes, seed=1))
    trainer = kr.ReplicatedTrainer(case.build, devices=1)
    trainer.compile("adam", case.make_loss())
    trainer.fit(x[:BATCH_SIZE], y[:BATCH_SIZE], batch_size=BATCH_SIZE, verbose=0)
    speeds = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for variant in list(speeds) if number % 2 else reversed(list(speeds)):
                clock = EpochClock()
                callbacks = [clock]
                if variant == "with":
                    callbacks.append(kr.callbacks.Checkpoint(folder, every=every))
                trainer.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)
                speeds[variant].append(STEPS / clock.seconds[-1])
    return speeds


def main(arguments=None):
    """Measures and prints both figures; returns 1 where one is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["saving", "throughput"])
    options = parser.parse_args(arguments)
    missed = False
    kr.simulate_devices(4)
    if options.only != "throughput":
        seconds = saving(4 * options.rounds)
        name = "save 100 BatchNormalization layers, 4 replicas / 1"
        missed |= _say(name, seconds[4], seconds[1], 1.5, "s")
    if options.only != "saving":
        speeds = throughput(options.rounds)
        name = "ResNet-20, a checkpoint each 100 steps / without"
        missed |= _say(name, speeds["with"], speeds["without"], 0.97, "steps/s")
    return int(missed)


def _say(name, ours, others, bound, unit):
    """Prints a figure; returns whether it misses its bound (largest seconds, smallest speed)."""
    ratio = statistics.median(mine / other for mine, other in zip(ours, others))
    is_met = ratio <= bound if unit == "s" else ratio >= bound
    print(
        f"{name}: {statistics.median(ours):.3g} / {statistics.median(others):.3g} {unit}, "
        f"median of the rounds' ratios {ratio:.3f} ({min(a / b for a, b in zip(ours, others)):.3f}"
        f" to {max(a / b for a, b in zip(ours, others)):.3f}), "
        f"{'at most' if unit == 's' else 'at least'} {bound} asked: "
        f"{'met' if is_met else 'MISSED'}",
        flush=True,
    )
    return not is_met


if __name__ == "__main__":
    sys.exit(main())
