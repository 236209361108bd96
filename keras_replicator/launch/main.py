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
    _add_verify(commands)
    _add_env(commands)
    _add_checkpoint(commands)
    return parser


def _add_plan(commands):
    parser = commands.add_parser(
        "plan",
        help="say what would run where, and why; with a script, how fast on other hardware",
        description="Prints what would run where on this machine, and why. With a script: runs it "
        "up to its first fit on one device, measures a step there, and prints its plan, what an "
        "update reduces, and the predicted step time and efficiency on the hardware that the "
        "options describe. With a script and --mesh: runs it up to its first trainer.compile, "
        "allocates no weights, and prints the plan with the bytes of each device, also for devices "
        "that are not here. Most options may also stand behind the script; what is no option of "
        "plan goes to the script.",
    )
    number = {"type": _parse_count, "metavar": "N"}
    parser.add_argument(
        "--batch-size", help="rows of a global batch (default: as trained)", **number
    )
    parser.add_argument("--rows", help="rows of the batch that is measured here", **number)
    _add_hardware(parser)
    parser.add_argument("script", nargs="?", help="a Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=_plan, plan_parser=parser)


def _add_hardware(parser):
    number = {"type": _parse_count, "metavar": "N"}
    parser.add_argument("--gpus", help="devices of each worker (default: 1)", **number)
    parser.add_argument("--workers", help="machines (default: 1)", **number)
    parser.add_argument("--bandwidth", metavar="B", help="of the slowest link (default: 25GB/s)")
    parser.add_argument("--latency", metavar="S", help="of the same link (default: 10us)")
    parser.add_argument(
        "--speedup",
        type=_parse_seconds,
        metavar="X",
        help="how many times as fast as this device each of those is (default: 1)",
    )
    parser.add_argument(
        "--mesh", type=_parse_mesh, metavar="batch=B,model=M", help="split the model over a mesh"
    )


def _plan(parser, arguments):
    if arguments.script is None:
        from keras_replicator.plan import describe_machine

        print(describe_machine())
        return 0
    from keras_replicator.launch.plan import plan_script
    from keras_replicator.scaling import parse_bandwidth, parse_seconds

    parser = arguments.plan_parser
    if not Path(arguments.script).is_file():
        parser.error(f"there is no such script. Received: {arguments.script!r}")
    behind = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    _add_hardware(behind)
    behind, rest = behind.parse_known_args(arguments.arguments)
    mesh = behind.mesh or arguments.mesh
    if mesh is not None:
        return _plan_mesh(parser, arguments.script, mesh, rest)
    names = ("gpus", "workers", "bandwidth", "latency", "speedup")
    given = {name: getattr(behind, name) or getattr(arguments, name) for name in names}
    given["batch_size"] = arguments.batch_size
    given = {name: value for name, value in given.items() if value is not None}
    try:
        parse_bandwidth(given.get("bandwidth", 1.0))
        parse_seconds(given.get("latency", 0.0))
    except ValueError as error:
        parser.error(str(error))
    return plan_script(arguments.script, rest, given, arguments.rows)


def _plan_mesh(parser, script, mesh, rest):
    from keras_replicator.mesh_planning import plan_script

    if plan_script(script, mesh, rest):
        return 0
    print(f"{parser.prog}: error: the script compiled no trainer.", file=sys.stderr)
    return 1


def _add_verify(commands):
    parser = commands.add_parser(
        "verify",
        help="compare a model and its step on N simulated devices with one",
        description="Trains a few steps on 1 and on N simulated devices, prints the largest "
        "differences and names their cause. Exits with 1 when N replicas do not compute what one "
        "device computes for a reason that is a mistake.",
    )
    parser.add_argument(
        "build",
        metavar="module:build",
        help="a function that returns a Keras model, a compiled trainer, or one of them and data",
    )
    parser.add_argument("--data", metavar="module:function", help="a function that returns x, y")
    parser.add_argument("--step", metavar="module:function", help="the custom training step")
    parser.add_argument("--optimizer", help="where the model is not compiled (default: sgd)")
    parser.add_argument("--loss", help="where the model is not compiled (default: mse)")
    parser.add_argument(
        "--replicas",
        type=_parse_counts,
        default=(2, 4),
        metavar="N,M",
        help="numbers of replicas (default: 2,4)",
    )
    parser.add_argument(
        "--batch-size", type=_parse_count, metavar="B", help="rows of a global batch (default: 32)"
    )
    parser.add_argument("--steps", type=_parse_count, default=3, metavar="S", help="default: 3")
    parser.add_argument("--timeout", type=_parse_seconds, default=600, metavar="S")
    parser.set_defaults(run=_verify, verify_parser=parser)


def _verify(parser, arguments):
    from keras_replicator.launch.verify import verify
    from keras_replicator.verify import VerifyError

    given = {
        name: getattr(arguments, name)
        for name in "data step optimizer loss replicas batch_size steps timeout".split()
    }
    try:
        report = verify(arguments.build, **given)
    except ValueError as error:
        arguments.verify_parser.error(str(error))
    except VerifyError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 1 if report.mistakes else 0


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
    export.add_argument(
        "path", help="model.keras, model.weights.h5, or a folder for a SavedModel for serving"
    )
    export.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module that defines and registers custom layers; may be given several times",
    )
    export.set_defaults(run=_export_checkpoint)


def _show_checkpoint(parser, arguments):
    from keras_replicator.launch.checkpoint import show

    print(show(arguments.directory))
    return 0


def _export_checkpoint(parser, arguments):
    from keras_replicator.launch.checkpoint import export

    for path in export(arguments.directory, arguments.path, arguments.modules):
        print(path)
    return 0


def _parse_counts(text):
    return tuple(_parse_at_least(part.strip(), 2) for part in text.split(","))


def _parse_mesh(text):
    mesh = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if not axis or not equals or axis in mesh:
            raise argparse.ArgumentTypeError(
                "must name each axis and its size once, such as batch=2,model=4. "
                f"Received: {text!r}"
            )
        mesh[axis] = _parse_at_least(size, 1)
    return mesh


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
