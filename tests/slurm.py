"""A real Slurm on this machine, from Debian's packages: two nodes with names of their own.

    with cluster(tmp_path) as run:
        done = run(["srun", "--nodes=2", "python", "train.py"], timeout=100)

Needs root, as Slurm's daemons do, and a mount namespace, in which the nodes' names are known.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel", "unshare")
NODES = ("n1", "n2")

CONFIGURATION = """
ClusterName=keras_replicator
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=60
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Why Slurm cannot be brought up here, or None."""
    missing = [name for name in PROGRAMS if _find(name) is None]
    if missing:
        return f"Slurm is not installed (.ci/run does it): {', '.join(missing)} are missing"
    return "Slurm's daemons need root" if os.geteuid() != 0 else None


@contextlib.contextmanager
def cluster(folder):
    """Brings the cluster up, and down again; yields `run(command, timeout, **environment)`.

    `run` runs a command of Slurm and returns its `CompletedProcess`.
    """
    folder.chmod(0o755)
    (folder / "state").mkdir()
    configuration = folder / "slurm.conf"
    ports = _free_ports(1 + len(NODES))
    configuration.write_text(_configure(folder, ports))
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost " + " ".join(NODES) + "\n")
    with contextlib.ExitStack() as stack:

        def start(name, *command):
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(_end, process)

        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start(
            "munged",
            _find("munged"),
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            *files,
        )
        _wait_until(lambda: (folder / "munge.socket").exists(), folder)
        start("slurmctld", _find("slurmctld"), "-D")
        for node in NODES:
            inside = f"mount --bind {hosts} /etc/hosts && exec {_find('slurmd')} -D -N {node}"
            start(f"slurmd-{node}", _find("unshare"), "--mount", "sh", "-c", inside)

        def ask(*command, timeout=30):
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=timeout
            )

        stack.callback(ask, "scancel", "--user=root", "--full", "--signal=KILL")
        _wait_until(
            lambda: ask("sinfo", "-h", "-o", "%D %t").stdout.split() == [str(len(NODES)), "idle"],
            folder,
        )

        def run(command, timeout, **more):
            return subprocess.run(
                command,
                env={**environment, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                timeout=timeout,
            )

        yield run


def _configure(folder, ports):
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    return CONFIGURATION.format(
        host=host, folder=folder, ports=ports, nodes="\n".join(nodes), names=",".join(NODES)
    )


def _find(program):
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until(condition, folder, seconds=60):
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            texts = {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}
            logs = {name: text[-1000:] for name, text in texts.items()}
            raise TimeoutError(f"Slurm did not come up in {seconds} seconds: {logs}")
        time.sleep(0.2)


def _end(process):
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
