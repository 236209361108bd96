"""A job of two workers that runs every scenario in turn, or those named by its arguments."""

import traceback

from tests.multiworker.jobs import start
from tests.multiworker.scenarios import SCENARIOS, make_trainer


def main(results, folder, *names):
    for name in names or SCENARIOS:
        try:
            results[name] = SCENARIOS[name](make_trainer, folder)
        except Exception:
            results[name] = {"error": traceback.format_exc()}


if __name__ == "__main__":
    start(main)
