"""One script for all roles: the chief trains, and has the results."""

import time
import traceback

import keras

import keras_replicator as kr
from tests.helpers import toy
from tests.multiworker.jobs import start
from tests.parameter_server import scenarios
from tests.parameter_server.killing import note_process

SERIAL = ("one_after_the_other", "mixed_precision", "tables")


def make(build, **options):
    """A trainer on the servers of this job."""
    keras.utils.set_random_seed(0)
    return kr.ReplicatedTrainer(build, **{"strategy": "parameter_server", **options})


def make_serial(build, **options):
    """The same, without staleness."""
    return make(build, max_staleness=0, **options)


def main(results, folder, *names):
    note_process(folder)
    make(toy)  # workers and servers serve from here on
    for name in names:
        scenario, begun = getattr(scenarios, name), time.monotonic()
        try:
            found = scenario(make_serial if name in SERIAL else make, folder)
        except Exception:
            found = {"error": traceback.format_exc()}
        results[name] = found
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    results["done"] = True


if __name__ == "__main__":
    start(main)
