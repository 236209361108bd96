"""A job of two workers that runs every scenario of a module in turn, or those that are named.

The arguments are the module, the devices of each worker, and names of scenarios.
"""

import importlib
import traceback

import keras

import keras_replicator as kr
from tests.multiworker.jobs import start
from tests.multiworker.scenarios import make_trainer


def main(results, folder, module, devices, *names):
    kr.simulate_devices(int(devices))
    scenarios = importlib.import_module(f"tests.multiworker.{module}").SCENARIOS
    for name in names or scenarios:
        keras.backend.clear_session()
        try:
            results[name] = scenarios[name](make_trainer, folder)
        except Exception:
            results[name] = {"error": traceback.format_exc()}


if __name__ == "__main__":
    start(main)
