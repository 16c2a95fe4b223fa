"""Both ends of each transport, for tests."""

import contextlib
import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor

from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.connect import connect, listen
from replicator.rpc.transports.payloads import Encoding
from replicator.rpc.transports.same_host.unix_socket import UnixConnection

SECRET = Secret.generate()
LONG_S = 60.0
SHORT_S = 0.1
LIMITS = MessageLimits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A transport in the table of the conformance suite."""

    address: str
    encodes: bool = True
    limits: MessageLimits = LIMITS

    def listen(self, **changes):
        limits = dataclasses.replace(self.limits, **changes)
        force = {"force_encoding": self.encodes} if "inproc" in self.address else {}
        return listen(self.address, secret=SECRET, limits=limits, **force)


TRANSPORTS = {
    "in-process": Row(address="inproc:", encodes=False),
    "in-process, encoded": Row(address="inproc:"),
    "unix": Row(address="unix:"),
    "unix, no shared memory": Row(
        address="unix:", limits=MessageLimits(shared_bytes=0)
    ),
    "grpc": Row(address="grpc://127.0.0.1:0"),
}
UNIX = [name for name, row in TRANSPORTS.items() if row.address == "unix:"]


@contextlib.contextmanager
def listening(row, **limits):
    listener = row.listen(**limits)
    try:
        yield listener
    finally:
        listener.close()


@contextlib.contextmanager
def connected(listener, limits=LIMITS, secret=SECRET):
    """Yield a client's and a server's connection."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        promise = pool.submit(lambda: listener.accept()())
        stack.callback(lambda: promise.done() or listener.close())
        client = connect(
            listener.address, secret=secret, limits=limits, timeout_s=LONG_S
        )
        stack.callback(client.close)
        server = promise.result(LONG_S)
        stack.callback(server.close)
        yield client, server


def pass_on(sender, receiver, value, *, kind=MessageKind.CALL, call_id=7):
    """Send a value in one thread, return what is received in this one."""
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(sender.send, kind, call_id, value, timeout_s=LONG_S)
        message = receiver.receive(timeout_s=LONG_S)
        sent.result(LONG_S)
    assert (message.kind, message.call_id) == (kind, call_id)
    return message.payload.take()


@contextlib.contextmanager
def raw_peer(limits=LIMITS, **changes):
    """Yield a connection, and the socket of a peer who sends what it likes."""
    ours, theirs = socket.socketpair()
    known = {
        "peer": "the other end",
        "encoding": Encoding(DEFAULT_REGISTRY, limits),
        "shared": None,
    }
    connection = UnixConnection(ours, **known | changes)
    theirs.settimeout(LONG_S)
    try:
        with theirs:
            yield connection, theirs
    finally:
        connection.close()


def wait_until(condition):
    """Wait for the state of something that tells nobody when it changes."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
