"""Serve what `rpc` is compared with, in a process of its own.

`python -m benchmarks.rpc.peer_process raw|zeromq PATH` or `grpc`; the address is the
line it writes.
"""

import socket
import struct
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.rpc.processes import wait_until_let_go

LENGTH = struct.Struct("!Q")
GRPC_SERVICE = "benchmark"
LARGEST_BYTES = 1 << 26


def receive_into(connection: socket.socket, view: memoryview) -> bool:
    """Fill `view`; tell whether the other end was there to the end."""
    while view:
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def serve_raw(path: str) -> None:
    """Echo messages of the size that each connection names first."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def echo(connection: socket.socket) -> None:
        with connection:
            (num_bytes,) = LENGTH.unpack(connection.recv(LENGTH.size))
            buffer = memoryview(bytearray(num_bytes))
            while receive_into(connection, buffer):
                connection.sendall(buffer)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(path, flush=True)
    wait_until_let_go()


def serve_zeromq(path: str) -> None:
    """Echo messages on a REP socket."""
    import zmq

    def echo() -> None:
        while True:
            server.send(server.recv())

    server = zmq.Context.instance().socket(zmq.REP)
    server.bind(f"ipc://{path}")
    threading.Thread(target=echo, daemon=True).start()
    print(f"ipc://{path}", flush=True)
    wait_until_let_go()


def serve_grpc() -> None:
    """Answer empty unary calls, and take arrays as streams of chunks."""
    import grpc

    # Warm memory, as a receiver that knows its work would have.
    arrived = np.zeros(LARGEST_BYTES, np.uint8).data

    def noop(request: bytes, context: grpc.ServicerContext) -> bytes:
        return b""

    def push(chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        place = 0
        for chunk in chunks:
            arrived[place : place + len(chunk)] = chunk
            place += len(chunk)
        return b""

    methods = {
        "noop": grpc.unary_unary_rpc_method_handler(noop),
        "push": grpc.stream_unary_rpc_method_handler(push),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.method_handlers_generic_handler(GRPC_SERVICE, methods)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    wait_until_let_go()
    server.stop(None).wait(5)


if __name__ == "__main__":
    kind, *where = sys.argv[1:]
    {"raw": serve_raw, "zeromq": serve_zeromq, "grpc": serve_grpc}[kind](*where)
