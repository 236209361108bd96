"""A network namespace for each process of a job, and the cut of one of them."""

import contextlib
import os
import shutil
import subprocess

PORT = 2222


@contextlib.contextmanager
def namespaces(count):
    """`count` namespaces on one bridge; yields their addresses, prefixes of commands, and `cut`.

    Raises:
        OSError: where this machine does not allow it.
    """
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        raise OSError("network namespaces need root, `ip` and `nsenter`")
    tag = f"kr{os.getpid() % 100_000}"
    net = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 250}"
    names = [f"{tag}n{number}" for number in range(count)]
    with contextlib.ExitStack() as stack:
        _ip("link", "add", tag, "type", "bridge")
        stack.callback(_ip, "link", "del", tag, check=False)
        _ip("link", "set", tag, "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name, check=False)
            _ip("link", "add", f"{name}o", "type", "veth", "peer", "name", f"{name}i")
            stack.callback(_ip, "link", "del", f"{name}o", check=False)
            _ip("link", "set", f"{name}o", "master", tag, "up")
            _ip("link", "set", f"{name}i", "netns", name)
            _ip("-n", name, "addr", "add", f"{net}.{number + 1}/24", "dev", f"{name}i")
            _ip("-n", name, "link", "set", f"{name}i", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield (
            [f"{net}.{number + 1}:{PORT}" for number in range(count)],
            [("nsenter", f"--net=/run/netns/{name}") for name in names],
            lambda number: _ip("link", "set", f"{names[number]}o", "down"),
        )


def _ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
