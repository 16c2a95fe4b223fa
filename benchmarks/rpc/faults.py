"""Measure what who has no secret can make a server hold, and when a stop is noticed.

40 strangers at once answer the server's challenge with a wrong secret, and send 32 MB
each without waiting for the verdict, until they are cut off: over the Unix socket and
over gRPC. What the server grew by at its peak is set against the size that one message
may have. Then a gRPC server is stopped (SIGSTOP) while a call waits for it.
"""

import contextlib
import os
import queue
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.rpc.processes import Child, started
from replicator.errors import ReplicatorError
from replicator.rpc.client.client import Client
from replicator.rpc.security.authentication import MESSAGE_BYTES, ClientHandshake
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

STRANGERS = 40
SENT_BYTES = 32 << 20
MESSAGE_LIMIT_BYTES = SENT_BYTES + (1 << 20)
_CHUNK_BYTES = 1 << 20
_LIMIT_S = 60.0
_CONNECT = "/replicator.rpc.Connections/Connect"


@contextlib.contextmanager
def program_secret(folder: Path) -> Iterator[None]:
    """Have a secret that this process and its children know, while the block lasts."""
    path = folder / "secret"
    Secret.generate().write(path)
    before = os.environ.get(FILE_VARIABLE)
    os.environ[FILE_VARIABLE] = str(path)
    try:
        yield
    finally:
        del os.environ[FILE_VARIABLE]
        if before is not None:
            os.environ[FILE_VARIABLE] = before


def measure(folder: Path) -> dict[str, float]:
    """Measure both; show how."""
    growth_ratios = {
        name: growth_ratio(address, attack)
        for name, address, attack in (
            ("Unix socket", f"unix:{folder}/attacked", flood_socket),
            ("gRPC", "grpc://127.0.0.1:0", flood_grpc),
        )
    }
    for name, growth in growth_ratios.items():
        print(f"{STRANGERS} x {SENT_BYTES >> 20} MB, {name}: + {growth:.3f} messages")
    return {
        "unauth_growth_ratio": max(growth_ratios.values()),
        "stop_noticed_s": stop_noticed_s(),
    }


def growth_ratio(address: str, attack: Callable[[str], None]) -> float:
    """Return what a server grows by at its peak, in largest messages.

    Args:
      address: Where it serves.
      attack: Does it once, at an address.
    """
    with service(address) as child:
        found = child.read_line()
        with Client(found, timeout_s=_LIMIT_S) as client:
            client.echo(bytes(1000))
            Path(f"/proc/{child.pid}/clear_refs").write_text("5")  # its peak is now
            before_kb = memory_kb(child.pid, "VmRSS")
            with ThreadPoolExecutor(STRANGERS) as threads:
                list(threads.map(attack, [found] * STRANGERS))
            client.echo(bytes(1000))  # it serves those who belong to it all the same
        grown_kb = memory_kb(child.pid, "VmHWM") - before_kb
    return grown_kb * 1024 / MESSAGE_LIMIT_BYTES


@contextlib.contextmanager
def service(address: str) -> Iterator[Child]:
    """Serve in a process of its own."""
    arguments = address, "2", str(MESSAGE_LIMIT_BYTES)
    # It logs each stranger.
    with started("benchmarks.rpc.service", *arguments, shows_errors=False) as child:
        yield child


def memory_kb(pid: int, what: str) -> int:
    """Read a line of a process's status."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{what}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None, what
    return int(found[1])


def flood_socket(address: str) -> None:
    """Send as much as the server takes, after a wrong answer."""
    handshake = ClientHandshake(Secret.generate())
    junk = bytes(_CHUNK_BYTES)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_LIMIT_S)
        # Cut off is what is hoped for; when does not matter.
        with contextlib.suppress(OSError, ReplicatorError):
            connection.connect(address.removeprefix("unix:"))
            connection.sendall(handshake.hello())
            challenge = connection.recv(MESSAGE_BYTES, socket.MSG_WAITALL)
            connection.sendall(handshake.answer(challenge))
            for _ in range(SENT_BYTES // _CHUNK_BYTES):
                connection.sendall(junk)


def flood_grpc(address: str) -> None:
    """Likewise on a stream of gRPC, without our client."""
    import grpc

    host = address.removeprefix("grpc://")
    handshake = ClientHandshake(
        Secret.generate(), binding=f"grpc:{host.rpartition(':')[2]}"
    )
    challenges: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def sent() -> Iterator[bytes]:
        yield handshake.hello()
        with contextlib.suppress(queue.Empty, ReplicatorError):
            yield handshake.answer(challenges.get(timeout=_LIMIT_S))
        for _ in range(SENT_BYTES // _CHUNK_BYTES):
            yield bytes(_CHUNK_BYTES)

    with grpc.insecure_channel(host) as channel:
        replies = channel.stream_stream(_CONNECT)(sent(), timeout=_LIMIT_S)
        with contextlib.suppress(grpc.RpcError):
            for reply in replies:
                challenges.put(reply)
        challenges.put(b"")


def stop_noticed_s() -> float:
    """Return how long a call waits for a gRPC server that was stopped."""
    with service("grpc://127.0.0.1:0") as child:
        client = Client(child.read_line(), timeout_s=_LIMIT_S)
        client.noop()
        waiting = client.futures.wait(_LIMIT_S)
        time.sleep(0.5)  # the call is there by now; if not, it waits all the same
        child.process.send_signal(signal.SIGSTOP)
        started_s = time.monotonic()
        error = waiting.exception(2 * _LIMIT_S)
        noticed_s = time.monotonic() - started_s
        client.close()
        child.process.kill()
    print(f"a stop is noticed after {noticed_s:.2f} s: {type(error).__name__}: {error}")
    return noticed_s
