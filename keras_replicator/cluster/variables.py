"""How environment variables are read, and quoted in errors."""

from collections.abc import Iterable, Mapping

from keras_replicator.cluster.cluster import ClusterError

# Below Linux' ephemeral ports (from 32768), so that no outgoing connection takes one of ours.
FIRST_PORT = 10_000
PORTS_PER_JOB = 32
NUM_JOBS = 700


def quote(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Returns what was read, for an error: "Received: A='1', B (not set)."."""
    values = [
        f"{name}={environ[name]!r}" if environ.get(name) else f"{name} (not set)" for name in names
    ]
    return f"Received: {', '.join(values)}."


def require(environ: Mapping[str, str], names: Iterable[str], what: str, fix: str) -> None:
    """Raises `ClusterError` with `what` and `fix` unless every variable is set."""
    names = tuple(names)
    missing = [name for name in names if not environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ClusterError(
            f"{what}, but {', '.join(missing)} {verb} not set. {quote(environ, names)} {fix}"
        )


def read_int(environ: Mapping[str, str], name: str, minimum: int = 0) -> int:
    """Returns a variable as an int of at least `minimum`, or raises `ClusterError`."""
    text = environ[name].strip()
    if not text.isdecimal() or int(text) < minimum:
        raise ClusterError(
            f"The environment variable {name} must be an integer of at least {minimum}. "
            f"{quote(environ, [name])} Unset it, or start the job with its own launcher."
        )
    return int(text)


def read_base_port(environ: Mapping[str, str], job: int) -> int:
    """Returns the first port of a job: KERAS_REPLICATOR_PORT, or one that its number picks.

    Every task of a job computes the same port without talking to the others, and jobs with
    neighbouring numbers, which may share a machine, get different ones.
    """
    if environ.get("KERAS_REPLICATOR_PORT"):
        return read_int(environ, "KERAS_REPLICATOR_PORT", minimum=1)
    return FIRST_PORT + PORTS_PER_JOB * (job % NUM_JOBS)


def check_port(environ: Mapping[str, str], port: int) -> int:
    """Returns a port that exists, or raises `ClusterError`."""
    if not 1 <= port <= 65535:
        raise ClusterError(
            f"A task of this job would listen on port {port}, but ports end at 65535. "
            f"{quote(environ, ['KERAS_REPLICATOR_PORT'])} Set KERAS_REPLICATOR_PORT to a smaller "
            "one."
        )
    return port
