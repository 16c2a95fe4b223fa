"""Both ends of the gRPC transport, for tests: honest ones, and strangers."""

import contextlib
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.security.authentication import ClientHandshake
from replicator.rpc.transports.between_hosts.grpc_stream import (
    GrpcListener,
    connect_grpc,
)
from replicator.rpc.transports.payloads import Encoding
from tests.rpc.transports.ends import LIMITS, LONG_S, SECRET

CONNECT = "/replicator.rpc.Connections/Connect"
ANY_PORT = "grpc://127.0.0.1:0"


def arguments(**changes):
    known = {"secret": SECRET, "encoding": Encoding(DEFAULT_REGISTRY, LIMITS)}
    return known | changes


@contextlib.contextmanager
def listening(address=ANY_PORT, **changes):
    listener = GrpcListener(address, **arguments(**changes))
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def admitting(listener):
    """Start to accept and admit one peer; yield the promise of its connection."""
    with ThreadPoolExecutor(1) as pool:
        promise = pool.submit(lambda: listener.accept()())
        try:
            yield promise
        finally:
            if not promise.done():
                listener.close()


@contextlib.contextmanager
def connected(listener, **changes):
    """Yield a client's and a server's connection."""
    with contextlib.ExitStack() as stack:
        promise = stack.enter_context(admitting(listener))
        client = dial(listener, **changes)
        stack.callback(client.close)
        server = promise.result(LONG_S)
        stack.callback(server.close)
        yield client, server


def dial(listener, **changes):
    return connect_grpc(listener.address, **arguments(timeout_s=LONG_S, **changes))


@contextlib.contextmanager
def relaying(host, port, *, to):
    """Listen at a place, carry bytes to another and back; yield who came."""
    came, ends = [], []

    def carry(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, name = door.accept()
                came.append(name)
                far = socket.create_connection(to, LONG_S)
                ends.extend([near, far])
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server((host, port), family=socket.AF_INET6) as door:
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


class Stranger:
    """A stream to a server without our client in it: it sends what it likes."""

    def __init__(self, listener, **options):
        self.port = int(listener.address.rpartition(":")[2])
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self._out = queue.SimpleQueue()
        self._in = queue.SimpleQueue()
        connect = self._channel.stream_stream(CONNECT)
        self._call = connect(iter(self._out.get, None), **options)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.code = None

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self._out.put(None)
        self._call.cancel()
        self._channel.close()
        self._reader.join(LONG_S)

    def send(self, chunk):
        self._out.put(chunk)

    def receive(self):
        """Return the next chunk; None: the server has ended the stream."""
        return self._in.get(timeout=LONG_S)

    def prove(self, secret=SECRET):
        """Do the handshake as a client does."""
        handshake = ClientHandshake(secret, binding=f"grpc:127.0.0.1:{self.port}")
        self.send(handshake.hello())
        self.send(handshake.answer(self.receive()))
        handshake.finish(self.receive() or b"")

    def _read(self):
        try:
            for chunk in self._call:
                self._in.put(chunk)
        except grpc.RpcError as failure:
            self.code = failure.code()
        self._in.put(None)
