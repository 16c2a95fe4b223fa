"""A process at one end of the gRPC transport, for tests that kill or stop it.

`python -m tests.rpc.transports.between_hosts.grpc_worker listen`, or `connect ADDRESS`;
the secret is where the environment says. It echoes, and writes a line when it is ready.
"""

import contextlib
import ctypes
import sys
import threading

from replicator.errors import ConnectionLostError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.between_hosts.grpc_stream import (
    GrpcListener,
    connect_grpc,
)
from tests.rpc.transports.between_hosts.grpc_ends import ANY_PORT, LONG_S, arguments


def echo(connection):
    with contextlib.suppress(ConnectionLostError):
        while True:
            message = connection.receive(timeout_s=None)
            value = message.payload.take()
            if isinstance(value, tuple) and value[0] == "hold the GIL":
                # Called through the Python API, `usleep` does not let go of it.
                ctypes.PyDLL(None).usleep(int(value[1] * 1e6))
            connection.send(MessageKind.REPLY, message.call_id, value, timeout_s=LONG_S)
    connection.close()


def listen():
    secret = Secret.from_environment()
    listener = GrpcListener(ANY_PORT, **arguments(secret=secret))
    print(listener.address, flush=True)
    with contextlib.suppress(ConnectionLostError):
        while True:
            door = listener.accept()
            threading.Thread(target=lambda door=door: echo(door()), daemon=True).start()


def connect(address):
    secret = Secret.from_environment()
    connection = connect_grpc(address, **arguments(secret=secret, timeout_s=LONG_S))
    print("connected", flush=True)
    connection.send(MessageKind.CALL, 1, "here", timeout_s=LONG_S)
    sys.stdin.read()


if __name__ == "__main__":
    {"listen": listen, "connect": connect}[sys.argv[1]](*sys.argv[2:])
