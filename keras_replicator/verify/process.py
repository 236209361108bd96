"""Starts the process in which a job is verified, and reads its report.

TensorFlow has started in this process with its own devices; the other one simulates as many CPUs
as the largest number of replicas needs.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

from keras_replicator.hardware import SIMULATED_DEVICES_VARIABLE
from keras_replicator.verify.report import VerifyError

# A process that is verified belongs to no cluster, whatever this one belongs to.
_CLUSTER = ("TF_CONFIG", "SLURM_", "OMPI_", "PMI", "JOB_COMPLETION_INDEX", "TPU_", "CLOUD_TPU_")
_CLUSTER += ("KERAS_REPLICATOR_", "DTENSOR_")


def run(job, timeout):
    """Returns the `Report` of a job.

    Args:
        job: A `Job`.
        timeout: Seconds.

    Raises:
        VerifyError: When the step fails, or the process does, or it takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="keras_replicator_verify_") as folder:
        source, target = Path(folder) / "job", Path(folder) / "report"
        with open(source, "wb") as file:
            pickle.dump({"path": [os.path.abspath(entry) for entry in sys.path]}, file)
            pickle.dump(job, file)
        command = [sys.executable, "-m", "keras_replicator.verify.child", str(source), str(target)]
        try:
            ended = subprocess.run(
                command,
                env=_environment(max(job.replicas)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise VerifyError(
                f"verify took longer than {timeout} seconds and was ended. Give it smaller batches "
                f"(batch_size=), fewer steps, or more time (timeout=). Received: timeout={timeout}"
            ) from error
        if not target.exists():
            tail = "\n".join(ended.stdout.splitlines()[-20:])
            raise VerifyError(
                "The process in which verify runs ended with code "
                f"{ended.returncode} and without a report. If a module could not be imported, add "
                f"its folder to PYTHONPATH. The end of its output:\n{tail}"
            )
        report, error = pickle.loads(target.read_bytes())
    if error is not None:
        raise VerifyError(error)
    return report


def _environment(devices):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_CLUSTER)}
    root = str(Path(__file__).resolve().parents[2])
    path = [root, *filter(None, [kept.get("PYTHONPATH")])]
    return {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        SIMULATED_DEVICES_VARIABLE: str(devices),
    }
