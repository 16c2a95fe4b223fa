"""A gRPC stream without our client in it, and a relay: what strangers dial with."""

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from benchmarks.rpc_attack.attack import LONG_S

CONNECT = "/replicator.rpc.Connections/Connect"


class Stream:
    """A stream to a server: it sends what it likes."""

    def __init__(self, port: int, **options: Any) -> None:
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        connect = self._channel.stream_stream(CONNECT)
        self._call = connect(iter(self._out.get, None), **options)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, chunk: bytes) -> None:
        """Send a chunk."""
        self._out.put(chunk)

    def receive(self) -> bytes:
        """Return the next chunk; b"": the server has ended the stream, or is silent."""
        with contextlib.suppress(queue.Empty):
            return self._in.get(timeout=LONG_S) or b""
        return b""

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.put(None)
        self._call.cancel()
        self._channel.close()
        self._reader.join(LONG_S)

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):
            for chunk in self._call:
                self._in.put(chunk)
        self._in.put(None)


@contextlib.contextmanager
def relaying(place: tuple[str, int], *, to: tuple[str, int]) -> Iterator[list[str]]:
    """Listen at a place, carry bytes to another and back; yield who came."""
    came: list[str] = []
    ends: list[socket.socket] = []

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, name = door.accept()
                came.append(str(name))
                far = socket.create_connection(to, LONG_S)
                ends.extend([near, far])
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    with socket.create_server(place, family=family) as door:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield came
        finally:
            for each in (door, *ends):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            thread.join(LONG_S)
            for each in ends:
                each.close()
