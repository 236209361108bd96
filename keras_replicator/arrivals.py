"""The start of a job: each worker waits for the others, for so long, and can say who is missing.

TensorFlow waits for them inside of a call that ends with an error after an hour only. So the
workers meet before: each listens at its own address, where TensorFlow's server will listen
afterwards, and visits all others at theirs. It goes on when it has met each of them both ways, so
that nobody looks in vain for one that has gone on already.
"""

import contextlib
import errno
import socket
import threading
import time

INTERVAL = 0.2


def wait_for_all(addresses, worker, seconds):
    """Waits until every worker was seen; listens for them meanwhile.

    A worker that arrived, waited in vain, and has ended since, was seen: it is not missing.

    Args:
        addresses: "host:port" of every worker, by number.
        worker: Number of this worker.
        seconds: How long to wait at most.

    Returns:
        The numbers of the workers that were never seen, in order.

    Raises:
        OSError: When the port of this worker is taken.
    """
    others = {n: address for n, address in enumerate(addresses) if n != worker}
    deadline, seen = time.monotonic() + seconds, set()
    with _listening(int(addresses[worker].rpartition(":")[2])) as visitors:
        while True:
            for number, address in others.items():
                if number not in seen and _visit(address, worker):
                    seen.add(number)
            absent = tuple(sorted(set(others) - (seen & visitors)))
            if not absent or time.monotonic() > deadline:
                return absent
            time.sleep(INTERVAL)


def listens(address, seconds):
    """Whether somebody takes a connection at "host:port" within some seconds."""
    try:
        with _connect(address, seconds):
            return True
    except OSError:
        return False


def _visit(address, worker):
    try:
        with _connect(address, 5 * INTERVAL) as connection:
            connection.sendall(f"{worker}\n".encode())
            return True
    except OSError:
        return False


def _connect(address, seconds):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)


@contextlib.contextmanager
def _listening(port):
    """Context in which visitors are let in; yields the set of their numbers."""
    visitors, stopping = set(), threading.Event()
    with _make_server(port) as server:
        server.settimeout(INTERVAL)

        def accept():
            while not stopping.is_set():
                with contextlib.suppress(OSError, ValueError):
                    connection, _ = server.accept()
                    with connection:
                        # The visitor closes first, and keeps what is left of the connection:
                        # TensorFlow can listen at this port at once.
                        connection.settimeout(5 * INTERVAL)
                        text = b""
                        while part := connection.recv(32):
                            text += part
                        visitors.add(int(text))

        thread = threading.Thread(target=accept, name="keras_replicator-arrivals", daemon=True)
        thread.start()
        try:
            yield visitors
        finally:
            stopping.set()
            thread.join()


def _make_server(port):
    """Listens at all addresses of this machine, those of IPv6 included where it has any."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return socket.create_server(("", port), backlog=1024)
