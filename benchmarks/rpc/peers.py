"""Peers that `rpc` is compared with: their calls from this process to a second one."""

import contextlib
import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks.rpc.peer_process import GRPC_SERVICE, LENGTH, receive_into
from benchmarks.rpc.processes import started

CHUNK_BYTES = 1 << 20
LIMIT_S = 60.0
_PEER = "benchmarks.rpc.peer_process"

Call: TypeAlias = Callable[[], object]
"""One call, from its start until its answer is here."""


def is_installed(package: str) -> bool:
    """Return whether a peer can run here."""
    return importlib.util.find_spec(package) is not None


@contextlib.contextmanager
def raw_echoes(
    folder: Path, sizes: Mapping[str, int], *, core: int | None = None
) -> Iterator[Mapping[str, Call]]:
    """Echo messages on Unix sockets, from one buffer into another, both kept.

    Args:
      folder: Where the socket may lie.
      sizes: Bytes of a message, by name.
      core: Where the other process runs; see `started`.
    """
    with contextlib.ExitStack() as stack:
        place = folder / f"raw-{'-'.join(sizes)}"
        peer = stack.enter_context(started(_PEER, "raw", str(place), core=core))
        path = peer.read_line()
        yield {
            name: stack.enter_context(_raw_echo(path, size))
            for name, size in sizes.items()
        }


@contextlib.contextmanager
def _raw_echo(path: str, num_bytes: int) -> Iterator[Call]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(LENGTH.pack(num_bytes))
        sent, back = bytes(num_bytes), memoryview(bytearray(num_bytes))

        def call() -> None:
            connection.sendall(sent)
            receive_into(connection, back)

        yield call


@contextlib.contextmanager
def zeromq_ping(folder: Path, *, core: int | None = None) -> Iterator[Call]:
    """Echo 16 bytes through ZeroMQ, REQ to REP; `core` as in `started`."""
    import zmq

    with (
        started(_PEER, "zeromq", str(folder / "zeromq"), core=core) as peer,
        zmq.Context() as context,
        context.socket(zmq.REQ) as client,
    ):
        client.connect(peer.read_line())

        def call() -> None:
            client.send(bytes(16))
            client.recv()

        yield call


@contextlib.contextmanager
def bare_grpc(array: np.ndarray) -> Iterator[Mapping[str, Call]]:
    """Call through grpcio alone: `noop`, and `push` of an array in chunks of 1 MiB."""
    import grpc

    view = array.data.cast("B")

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])

    with (
        started(_PEER, "grpc") as peer,
        grpc.insecure_channel(peer.read_line()) as channel,
    ):
        noop = channel.unary_unary(f"/{GRPC_SERVICE}/noop")
        push = channel.stream_unary(f"/{GRPC_SERVICE}/push")
        yield {
            "noop": lambda: noop(b"", timeout=LIMIT_S),
            "push": lambda: push(chunks(), timeout=LIMIT_S),
        }


@contextlib.contextmanager
def ray_actor(array: np.ndarray) -> Iterator[Mapping[str, Call]]:
    """Call an actor of Ray: `noop`, and `push` of an array."""
    # Ray tells of a change to come, on every start, unless this says that we know.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    class Service:
        def noop(self) -> None:
            """Do nothing."""

        def push(self, pushed: np.ndarray) -> None:
            touch_pages(pushed)

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=1 << 29,
    )
    try:
        actor: Any = ray.remote(Service).remote()
        yield {
            "noop": lambda: ray.get(actor.noop.remote(), timeout=LIMIT_S),
            "push": lambda: ray.get(actor.push.remote(array), timeout=LIMIT_S),
        }
    finally:
        ray.shutdown()


def array_copy(array: np.ndarray) -> Call:
    """Copy an array to memory that is warm: the least that a push can cost."""
    target = np.copy(array)
    return lambda: np.copyto(target, array)


def touch_pages(array: np.ndarray) -> None:
    """Read a byte of each page: whoever takes an array must be able to."""
    array.view(np.uint8).reshape(-1)[::4096].max()
