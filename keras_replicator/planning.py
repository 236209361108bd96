"""`keras-replicator plan script.py`: the script runs up to its first `fit`, which plans instead.

The command sets an environment variable with the wanted hardware and starts the script. Its
trainer takes one device of this machine, measures a step there, prints the plan and the forecast,
and ends the process.
"""

import json
import os

VARIABLE = "KERAS_REPLICATOR_PLAN"


class Planning:
    """What a script that is planned does instead of training.

    Args:
        hardware: Dict of arguments of `scaling.predict`; none for the plan of this machine only.
        rows: Rows of the batch that is measured, or None.
    """

    def __init__(self, hardware, rows=None):
        self._hardware = hardware
        self._rows = rows

    def finish(self, trainer, x, y, sample_weight, source):
        """Measures, prints, and ends the process with code 0."""
        from keras_replicator.scaling import readable

        batch_size = getattr(source, "batch_size", None)
        wanted = self._hardware.get("batch_size")
        replicas = self._hardware.get("gpus", 1) * self._hardware.get("workers", 1)
        rows = self._rows
        if rows is None:
            known = wanted or batch_size
            rows = None if known is None else -(-known // replicas)
        trainer.measure(x, y, sample_weight, batch_size=wanted or batch_size, rows=rows)
        profile = trainer.plan.profile
        print(trainer.plan)
        print(f"  reduced per update  {readable(profile.update_bytes)}")
        print(f"  weights and slots   {readable(profile.state_bytes)} on every device")
        print()
        print(trainer.plan.on(**self._hardware))
        raise SystemExit(0)


def planning_from_environment(environ=os.environ):
    """Returns the `Planning` that the command line asked for, or None."""
    text = environ.get(VARIABLE)
    if not text:
        return None
    options = json.loads(text)
    return Planning(options["hardware"], options["rows"])
