"""Holds the forecasts of keras_replicator/scaling.py against workers that really run.

    python -m tests.scaling                  # 2 workers, one core each; a table
    python -m tests.scaling tables           # forecasts for ResNet-50, SN-GAN and D4PG

The link is fitted to two all-reduces between the workers, and the step to one worker alone. The
steps of two workers, which are predicted, are used for neither. docs/scaling.md has a run's table.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers import REPOSITORY, child_environment

SMALL, LARGE = 256, 8_000_000  # float32 numbers of the two all-reduces
WORKERS = 2
TIMEOUT = 170  # seconds of each of the two runs


def models():
    """`{name: (build, arguments of compile, rows of x, rows of y, global batch)}`."""
    import keras
    import numpy as np

    sys.path.insert(0, str(REPOSITORY / "examples"))
    from resnet50.model import build_model

    def mlp(inputs, units, outputs):
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((inputs,)), dense(units, "relu"), dense(outputs)])

    def rows(*shape):
        return np.random.default_rng(0).normal(size=(8, *shape)).astype("float32")

    labels, sgd = np.arange(8) % 10, {"optimizer": "sgd", "loss": _loss()}
    return {
        "MLP 784-128-10": (lambda: mlp(784, 128, 10), sgd, rows(784), labels, 256),
        "MLP 1024-4096-10": (lambda: mlp(1024, 4096, 10), sgd, rows(1024), labels, 256),
        "ResNet-20, batch 16": (
            lambda: build_model("resnet20", (32, 32, 1), 10),
            sgd,
            rows(32, 32, 1),
            labels,
            16,
        ),
        "ResNet-50 64x64, batch 8": (
            lambda: build_model("resnet50", (64, 64, 3), 10),
            sgd,
            rows(64, 64, 3),
            labels,
            8,
        ),
    }


def _loss():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def work(target, workers):
    """What each worker does: measures steps, and all-reduces where there are two."""
    import keras_replicator as kr

    found, trainer = {}, None

    def save():
        if trainer.plan.is_chief:
            Path(target).write_text(json.dumps(found), encoding="utf-8")

    for name, (build, options, x, y, batch) in models().items():
        trainer = kr.ReplicatedTrainer(build, seed=0)
        trainer.compile(**options)
        for size in (SMALL, LARGE) if workers > 1 and not found else ():
            found[f"reduce {size}"] = {"seconds": _seconds_of_reduce(trainer, size)}
        rows = batch if workers > 1 else batch // WORKERS
        profile = trainer.measure(x, y, batch_size=rows)
        found[name] = {
            "seconds": profile.compute_seconds(rows),
            "update_bytes": profile.update_bytes,
            "step_bytes": profile.step_bytes,
        }
        save()
        print(name, found[name], flush=True)


def _seconds_of_reduce(trainer, size):
    import numpy as np
    import tensorflow as tf

    import keras_replicator as kr

    def reduce(value):  # one for each size, so that its shape is known
        return kr.replica.all_sum(value)

    value, seconds = kr.PerReplica([tf.ones(size)]), []
    for _ in range(9):
        started = time.perf_counter()
        np.asarray(trainer.run(reduce, value)[0])[0]
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _run(command, seconds=TIMEOUT):
    """Runs a command, and ends it where it takes too long: what it has measured counts."""
    process = subprocess.Popen(command, env=child_environment(), start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds} seconds: {command}", flush=True)
    finally:
        for group in _groups_below(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _groups_below(parent):
    """The process groups of a process and of its children, which the launcher gives one each."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid="], capture_output=True, text=True)
    rows = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
    below, found = {parent}, {parent}
    for pid, above, group in sorted(rows):
        if above in below:
            below.add(pid)
            found.add(group)
    return found


def main():
    """Measures one and two workers, and prints prediction, measurement and error."""
    from keras_replicator.scaling import ring_seconds

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for workers in (1, WORKERS):
            target = str(Path(folder) / f"{workers}.json")
            script = [str(Path(__file__)), target, str(workers)]
            if workers == 1:
                command = ["taskset", "-c", "0", sys.executable, *script]
            else:
                launch = ["-m", "keras_replicator", "launch", "--workers", str(workers)]
                command = [sys.executable, *launch, *script]
            _run(command)
            if not Path(target).exists():
                raise SystemExit(f"{workers} worker(s) have measured nothing")
            found[workers] = json.loads(Path(target).read_text(encoding="utf-8"))
    one, two = found[1], found[WORKERS]
    small, large = (two[f"reduce {size}"]["seconds"] for size in (SMALL, LARGE))
    bandwidth = 4 * (LARGE - SMALL) / (large - small)
    latency = max(small - 4 * SMALL / bandwidth, 0) / 2
    print(f"link: {bandwidth / 1e6:.0f} MB/s, {1e6 * latency:.0f} µs")
    print(f"{'model':<28}{'alone':>10}{'predicted':>11}{'measured':>10}{'error':>8}")
    for name, alone in one.items():
        predicted = alone["seconds"] + sum(
            ring_seconds(alone[size], WORKERS, bandwidth, latency)
            for size in ("update_bytes", "step_bytes")
            if alone[size]
        )
        if name not in two:
            continue
        seconds = two[name]["seconds"]
        cells = (f"{1e3 * value:.2f}" for value in (alone["seconds"], predicted, seconds))
        alone_ms, predicted_ms, measured_ms = cells
        error = predicted / seconds - 1
        print(f"{name:<28}{alone_ms:>10}{predicted_ms:>11}{measured_ms:>10}{error:>8.0%}")


def table_of_resnet50():
    """ResNet-50 on 224 x 224: 8 images on each replica."""
    import numpy as np
    from resnet50.model import build_model
    from resnet50.presets import PRESETS
    from resnet50.recipe import SmoothedCrossentropy, make_optimizer

    import keras_replicator as kr

    trainer = kr.ReplicatedTrainer(
        lambda: build_model("resnet50", (224, 224, 3), 1000), devices=1, seed=0
    )
    optimizer = make_optimizer(PRESETS["resnet50"], 100)
    trainer.compile(optimizer=optimizer, loss=SmoothedCrossentropy())
    images = np.random.default_rng(0).normal(size=(8, 224, 224, 3)).astype("float32")
    trainer.measure(images, np.arange(8), batch_size=8)
    return trainer, {"workers": 64, "batch_size": 512}


def table_of_sngan():
    """SN-GAN on 32 x 32: 32 groups of images on each replica."""
    import numpy as np
    from sngan.model import build_models
    from sngan.presets import PRESETS
    from sngan.step import make_optimizers, make_train_step

    import keras_replicator as kr

    preset, random = PRESETS["fashion_mnist32"], np.random.default_rng(0)
    trainer = kr.ReplicatedTrainer(
        lambda: build_models(preset, 0),
        devices=1,
        train_step=make_train_step(preset, lambda: trainer.optimizers),
        seed=0,
    )
    trainer.compile(optimizer=make_optimizers(preset))
    shape = (16, preset.discriminator_updates)
    rows = {
        "image": random.normal(size=(*shape, *preset.image_shape)).astype("float32"),
        "label": random.integers(0, preset.num_classes, shape).astype("int32"),
    }
    trainer.measure(rows, batch_size=32)
    return trainer, {"workers": 64, "batch_size": 2048}


def table_of_d4pg():
    """D4PG with the published networks: one batch of 256 rows is split (strong scaling)."""
    import types

    import numpy as np
    from d4pg.config import PRESETS
    from d4pg.learner import make_optimizers
    from d4pg.networks import build_models
    from d4pg.update import make_update

    import keras_replicator as kr

    config, random = PRESETS["published"], np.random.default_rng(0)
    spec = types.SimpleNamespace(observation_shape=(5,), action_size=1)
    update = make_update(config, lambda: trainer.optimizers)
    trainer = kr.ReplicatedTrainer(
        lambda: build_models(config, spec, 0),
        devices=1,
        train_step=lambda models, batch: update(models, batch)[1],
        seed=0,
    )
    trainer.compile(optimizer=make_optimizers(config))
    rows = {
        "observation": random.normal(size=(256, 5)).astype("float32"),
        "action": random.uniform(-1, 1, (256, 1)).astype("float32"),
        "reward": random.uniform(size=256).astype("float32"),
        "discount": np.full(256, 0.95, "float32"),
        "next_observation": random.normal(size=(256, 5)).astype("float32"),
        "weight": np.ones(256, "float32"),
    }
    trainer.measure(rows, batch_size=256)
    return trainer, {"workers": 16}


TABLES = {"resnet50": table_of_resnet50, "sngan": table_of_sngan, "d4pg": table_of_d4pg}


def tables(names):
    """Measures models of the examples on this machine, and prints their forecasts."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    for name in names or TABLES:
        trainer, hardware = TABLES[name]()
        print(TABLES[name].__doc__, trainer.plan.profile, sep="\n")
        link = {"bandwidth": "10Gb/s", "latency": "50us"}
        print(trainer.plan.on(**hardware, **link), flush=True)
        for workers in (2, 4, 8, 16) if name == "d4pg" else ():
            forecast = trainer.plan.on(workers=workers, **link)
            milliseconds = 1e3 * forecast.step_seconds
            print(f"{workers} replicas: {milliseconds:.1f} ms, {forecast.efficiency:.0%}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["tables"]:
        tables(sys.argv[2:])
    elif len(sys.argv) == 3:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        main()
