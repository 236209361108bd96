"""`keras-replicator`: reads the command line and calls what it names."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_replicator.checkpoints import CheckpointError
from keras_replicator.cluster import ClusterError, detect_cluster
from keras_replicator.launch.launcher import GRACE_SECONDS, launch
from keras_replicator.version import __version__

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: The arguments; by default those of this process.

    Raises:
        SystemExit: with code 2 when the arguments are wrong.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _make_parser()
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(parser, arguments)
    except (ClusterError, CheckpointError) as err:
        print(f"{parser.prog}: error: {err}", file=sys.stderr)
        return 1


def _make_parser():
    parser = argparse.ArgumentParser(
        prog="keras-replicator",
        description="Trains Keras models on many devices and machines.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_launch(commands)
    _add_env(commands)
    _add_checkpoint(commands)
    return parser


def _add_plan(commands):
    parser = commands.add_parser("plan", help="say what would run where on this machine, and why")
    parser.set_defaults(run=_plan)


def _plan(parser, arguments):
    from keras_replicator.plan import describe_machine

    print(describe_machine())
    return 0


def _add_env(commands):
    parser = commands.add_parser("env", help="print versions, devices and the detected cluster")
    parser.set_defaults(run=_env)


def _env(parser, arguments):
    from keras_replicator.launch.env import describe_environment

    text, is_in_order = describe_environment()
    print(text)
    return 0 if is_in_order else 1


def _add_launch(commands):
    parser = commands.add_parser(
        "launch",
        help="run a script as several workers on this machine",
        description="Runs a Python script as the workers (and parameter servers) of one job on "
        "this machine. Exits with the code of the process that failed first. A script that ends "
        "with code 75 was preempted and has saved its state: it is started again.",
    )
    number = {"type": _parse_count, "metavar": "N"}
    parser.add_argument("--workers", default=1, help="number of workers (default: 1)", **number)
    parser.add_argument(
        "--ps",
        default=0,
        type=_parse_count_or_zero,
        metavar="M",
        help="number of parameter servers (default: 0); a chief that coordinates comes with them",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=_parse_count,
        metavar="K",
        help="split the CPU of each worker in K logical devices",
    )
    parser.add_argument(
        "--max-restarts",
        default=0,
        type=_parse_count_or_zero,
        metavar="R",
        help="how often a job that failed is started again (default: 0)",
    )
    parser.add_argument(
        "--log-dir", metavar="D", help="also write the output of each process to D/worker_0.log …"
    )
    parser.add_argument(
        "--grace",
        default=GRACE_SECONDS,
        type=_parse_seconds,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL (default: %(default)g)",
    )
    parser.add_argument("script", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=_launch, launch_parser=parser)


def _launch(parser, arguments):
    parser = arguments.launch_parser
    if not Path(arguments.script).is_file():
        parser.error(f"there is no such script. Received: {arguments.script!r}")
    num_processes = arguments.workers + arguments.ps
    cluster = detect_cluster() if num_processes > 1 else None
    if cluster is not None and cluster.num_workers > 1:
        parser.error(
            "this process is already one of several that form a job, and each of them would start "
            f"a job of its own. Received: {cluster}. Start the script itself in their place: "
            f"python {arguments.script}"
        )
    try:
        return launch(
            [sys.executable, arguments.script, *arguments.arguments],
            workers=arguments.workers,
            parameter_servers=arguments.ps,
            devices_per_worker=arguments.devices_per_worker,
            max_restarts=arguments.max_restarts,
            log_dir=arguments.log_dir,
            grace_seconds=arguments.grace,
        )
    except ValueError as err:
        parser.error(str(err))


def _add_checkpoint(commands):
    parser = commands.add_parser("checkpoint", help="look into a checkpoint, or export its model")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print what a checkpoint holds, and the plan behind it")
    show.add_argument("directory", help="a directory of checkpoints")
    show.set_defaults(run=_show_checkpoint)
    export = actions.add_parser("export", help="write the model of a checkpoint to a file")
    export.add_argument("directory", help="a directory of checkpoints")
    export.add_argument("path", help="model.keras")
    export.set_defaults(run=_export_checkpoint)


def _show_checkpoint(parser, arguments):
    from keras_replicator import checkpoints

    print(checkpoints.show(arguments.directory))
    return 0


def _export_checkpoint(parser, arguments):
    from keras_replicator import checkpoints

    checkpoints.export(arguments.directory, arguments.path)
    return 0


def _parse_count(text):
    return _parse_at_least(text, 1)


def _parse_count_or_zero(text):
    return _parse_at_least(text, 0)


def _parse_at_least(text, minimum):
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least {minimum}. Received: {text!r}"
        )
    return int(text)


def _parse_seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds. Received: {text!r}")
    return seconds
