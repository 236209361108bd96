"""Kubernetes: an Indexed Job or a JobSet whose pods find each other through a headless Service."""

from collections.abc import Mapping

from keras_replicator.cluster.cluster import Cluster, ClusterError
from keras_replicator.cluster.variables import check_port, quote, read_int, require

VARIABLES = (
    "JOB_COMPLETION_INDEX",
    "KERAS_REPLICATOR_NUM_WORKERS",
    "KERAS_REPLICATOR_SERVICE",
)
JOB_NAME = "KERAS_REPLICATOR_JOB_NAME"
# Every pod has an address of its own, so one port serves all jobs.
DEFAULT_PORT = 2222


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the job of this pod; None for a job of one pod, or outside of an Indexed Job.

    Kubernetes sets JOB_COMPLETION_INDEX. The manifest sets KERAS_REPLICATOR_NUM_WORKERS (its
    `completions`) and KERAS_REPLICATOR_SERVICE (its headless Service, the pods' `subdomain`), and
    may set KERAS_REPLICATOR_PORT and KERAS_REPLICATOR_JOB_NAME. Pod i is then
    `<job>-<i>.<service>`; a JobSet names its jobs `<jobset>-<replicated job>-0` and otherwise looks
    the same.

    An Indexed Job without KERAS_REPLICATOR_NUM_WORKERS is an error: it may want one model or many,
    and guessing wrong would train as many separate models as there are pods.
    """
    if not any(environ.get(name) for name in VARIABLES):
        return None
    if environ.get("KERAS_REPLICATOR_NUM_WORKERS") == "1":
        return None
    require(
        environ,
        VARIABLES,
        "This process looks like a pod of a Kubernetes Indexed Job",
        "Set KERAS_REPLICATOR_NUM_WORKERS to the job's completions and KERAS_REPLICATOR_SERVICE to "
        "its headless Service; where each pod trains its own model, set the former to 1.",
    )
    index = read_int(environ, "JOB_COMPLETION_INDEX")
    num_workers = read_int(environ, "KERAS_REPLICATOR_NUM_WORKERS", minimum=1)
    if index >= num_workers:
        raise ClusterError(
            f"This is pod {index} of a job of {num_workers}, counted from 0. "
            f"{quote(environ, VARIABLES)} Set KERAS_REPLICATOR_NUM_WORKERS to the job's "
            "completions."
        )
    job, service = _find_job_name(environ, index), environ["KERAS_REPLICATOR_SERVICE"]
    port = DEFAULT_PORT
    if environ.get("KERAS_REPLICATOR_PORT"):
        port = check_port(environ, read_int(environ, "KERAS_REPLICATOR_PORT", minimum=1))
    return Cluster(
        worker=tuple(f"{job}-{i}.{service}:{port}" for i in range(num_workers)),
        task_type="worker",
        task_index=index,
        source="JOB_COMPLETION_INDEX and KERAS_REPLICATOR_NUM_WORKERS",
    )


def _find_job_name(environ, index):
    if environ.get(JOB_NAME):
        return environ[JOB_NAME]
    job, _, suffix = environ.get("HOSTNAME", "").rpartition("-")
    if not job or suffix != str(index):
        raise ClusterError(
            "The pods of an Indexed Job are named <job>-<index>, and this pod's HOSTNAME is not, "
            "so the others cannot be found. "
            f"{quote(environ, ['HOSTNAME', 'JOB_COMPLETION_INDEX', JOB_NAME])} Set {JOB_NAME} to "
            "the name of the job."
        )
    return job
