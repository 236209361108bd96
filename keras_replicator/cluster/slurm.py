"""Slurm: the tasks of one `srun` step."""

import itertools
import re
from collections.abc import Mapping

from keras_replicator.cluster.cluster import Cluster, ClusterError
from keras_replicator.cluster.variables import (
    PORTS_PER_JOB,
    check_port,
    quote,
    read_base_port,
    read_int,
    require,
)

# What every task of a step carries. The batch script has SLURM_PROCID, too, but none of the step's.
VARIABLES = (
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_LOCALID",
)
STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")
# From here on step ids are batch scripts, interactive shells and what Slurm runs beside a job.
FIRST_SPECIAL_STEP = 0xFFFFFFF0

FIX = "Start the script with srun, or outside of Slurm unset its variables."


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the tasks of this `srun` step; None for one task, a batch script, a `salloc` shell.

    Tasks listen on consecutive ports, the first of which the job id picks (KERAS_REPLICATOR_PORT
    overrides it).
    """
    if not _is_task_of_step(environ):
        return None
    # A shell of `salloc` hands its job's SLURM_NTASKS on to a step of one task.
    count = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if environ.get(count) and read_int(environ, count, minimum=1) == 1:
        return None
    names = tuple(count if name == "SLURM_NTASKS" else name for name in VARIABLES)
    require(environ, names, "This process looks like a task of srun", FIX)

    rank, num_tasks = read_int(environ, "SLURM_PROCID"), read_int(environ, count, minimum=1)
    nodes = expand_nodelist(environ["SLURM_STEP_NODELIST"])
    per_node = expand_tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    if len(nodes) != len(per_node) or sum(per_node) != num_tasks or rank >= num_tasks:
        raise ClusterError(
            f"Slurm's variables contradict each other: task {rank} of {num_tasks}, {len(nodes)} "
            f"nodes, {sum(per_node)} tasks on {len(per_node)} nodes. {quote(environ, names)} {FIX}"
        )
    placed = place_tasks(per_node, _read_distribution(environ))
    _check_own_place(environ, placed[rank])
    base = read_base_port(environ, _number_job(environ))
    # Small jobs count by rank, for nodes that share a machine; large ones stay in their range.
    offsets = range(num_tasks) if num_tasks <= PORTS_PER_JOB else [local for _, local in placed]
    return Cluster(
        worker=tuple(
            f"{nodes[node]}:{check_port(environ, base + offset)}"
            for (node, _), offset in zip(placed, offsets, strict=True)
        ),
        task_type="worker",
        task_index=rank,
        source="SLURM_STEP_NODELIST",
    )


def expand_nodelist(text: str) -> list[str]:
    """Returns the hosts of a Slurm node list, in order.

    Example:

    >>> expand_nodelist("n[1,3-4],gpu[08-10]-ib")
    ['n1', 'n3', 'n4', 'gpu08-ib', 'gpu09-ib', 'gpu10-ib']

    Args:
        text: Names separated by commas, with any number of bracketed ranges in each.

    Raises:
        ClusterError: when a bracket is not closed, or a range is none.
    """
    hosts = []
    for name in re.findall(r"(?:\[[^\]]*\]|[^,])+", text):
        parts = re.split(r"\[([^\]]*)\]", name)
        # Every second part was inside brackets.
        choices = [_expand_ranges(text, p) if i % 2 else [p] for i, p in enumerate(parts)]
        if any("[" in part or "]" in part for part in parts[::2]):
            raise _nodelist_error(text)
        hosts += ["".join(chosen).strip() for chosen in itertools.product(*choices)]
    if not hosts or not all(hosts):
        raise _nodelist_error(text)
    return hosts


def _expand_ranges(text, ranges):
    numbers = []
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if not match:
            raise _nodelist_error(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _nodelist_error(text)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _nodelist_error(text):
    return ClusterError(
        "The node list of this Slurm step cannot be read; it should look like 'n[1-3,07],login'. "
        f"Received: SLURM_STEP_NODELIST={text!r}. {FIX}"
    )


def expand_tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node.

    Example:

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Args:
        text: Counts separated by commas, each with an optional repetition.

    Raises:
        ClusterError: when an entry has another form.
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ClusterError(
                "The tasks of each node of this Slurm step cannot be read; they should look like "
                f"'2(x3),1'. Received: SLURM_STEP_TASKS_PER_NODE={text!r}. {FIX}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def place_tasks(per_node: list[int], distribution: str = "block") -> list[tuple[int, int]]:
    """Returns where each task runs: (node, number on that node), by rank.

    Example:

    >>> place_tasks([2, 1])
    [(0, 0), (0, 1), (1, 0)]
    >>> place_tasks([2, 1], "cyclic")
    [(0, 0), (1, 0), (0, 1)]

    Args:
        per_node: The number of tasks of each node.
        distribution: "block" fills one node after the other, "cyclic" deals tasks out.
    """
    block = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    if distribution == "block":
        return block
    return sorted(block, key=lambda place: (place[1], place[0]))


def _is_task_of_step(environ):
    in_step = any(environ.get(name) for name in STEP)
    if not in_step:
        # The batch script is task 0; another number is a task whose environment was cut short.
        return environ.get("SLURM_PROCID", "0") != "0"
    return not (
        environ.get("SLURM_STEP_ID") and read_int(environ, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP
    )


def _read_distribution(environ):
    # What follows the colon is about the cores of a node.
    distribution = re.split(r"[:,]", environ.get("SLURM_DISTRIBUTION") or "block")[0]
    if distribution not in ("block", "cyclic"):
        raise ClusterError(
            "Which task runs on which node can be told for block and cyclic distributions only. "
            f"{quote(environ, ['SLURM_DISTRIBUTION'])} Start the script with srun "
            "--distribution=block."
        )
    return distribution


def _check_own_place(environ, place):
    node, local = place
    own = {"SLURM_LOCALID": local}
    if environ.get("SLURM_NODEID"):
        own["SLURM_NODEID"] = node
    if any(read_int(environ, name) != expected for name, expected in own.items()):
        names = ("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_DISTRIBUTION")
        raise ClusterError(
            f"By the order of its nodes this task should be number {local} of node {node}, but "
            f"Slurm placed it elsewhere. {quote(environ, names)} Start it with srun "
            "--distribution=block."
        )


def _number_job(environ):
    job, step = (
        read_int(environ, name) if environ.get(name) else 0
        for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    # A prime, so that the steps of a job do not meet the next jobs.
    return job + 101 * step
