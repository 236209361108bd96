"""`keras-replicator plan script.py`: runs a script up to its first `fit`, which plans instead."""

import json
import os
import subprocess
import sys

from keras_replicator.planning import VARIABLE

# A script that is planned belongs to no cluster.
_CLUSTER = ("TF_CONFIG", "SLURM_", "OMPI_", "PMI", "JOB_COMPLETION_INDEX")


def plan_script(script, arguments, hardware, rows=None):
    """Runs a script that plans instead of training, and returns its exit code.

    Args:
        script: Path of a Python script.
        arguments: Its arguments.
        hardware: Dict of arguments of `scaling.predict`.
        rows: Rows of the batch that is measured, or None.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_CLUSTER)}
    environ[VARIABLE] = json.dumps({"hardware": hardware, "rows": rows})
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return subprocess.run([sys.executable, script, *arguments], env=environ, check=False).returncode
