"""A peer over gRPC is killed, stopped or busy: the other end learns it, or not."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from replicator.errors import ConnectionLostError
from replicator.rpc.protocols import MessageKind
from replicator.rpc.security.secret import DESCRIPTOR_VARIABLE
from replicator.rpc.transports.between_hosts import grpc_stream
from replicator.rpc.transports.between_hosts.grpc_stream import connect_grpc
from tests.multiprocess.processes import stop
from tests.rpc.transports.between_hosts.grpc_ends import admitting, arguments, listening
from tests.rpc.transports.ends import LONG_S, SECRET

pytestmark = pytest.mark.slow
STOP_NOTICED_S = LONG_S / 2


@contextlib.contextmanager
def worker(*words):
    descriptor = SECRET.inheritable_descriptor()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.rpc.transports.between_hosts.grpc_worker",
            *words,
        ],
        env={**os.environ, DESCRIPTOR_VARIABLE: f"{descriptor}"},
        pass_fds=[descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(descriptor)
    try:
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


@pytest.fixture
def without_pings(monkeypatch):
    """Let clients ping nobody: by pings they would notice a death in 3.5 s."""
    known = grpc_stream.CLIENT_OPTIONS
    left = tuple((name, value) for name, value in known if "keepalive" not in name)
    monkeypatch.setattr(grpc_stream, "CLIENT_OPTIONS", left)


@pytest.fixture
def server():
    """Yield a server's process, and a connection to it."""
    with worker("listen") as process:
        address = process.stdout.readline().strip()
        connection = connect_grpc(address, **arguments(timeout_s=LONG_S))
        with contextlib.closing(connection):
            yield process, connection


def ask(connection, value):
    connection.send(MessageKind.CALL, 1, value, timeout_s=LONG_S)
    return connection.receive(timeout_s=LONG_S).payload.take()


def seconds_until_lost(connection):
    start = time.monotonic()
    with pytest.raises(ConnectionLostError):
        connection.receive(timeout_s=LONG_S)
    return time.monotonic() - start


def test_a_killed_server_is_noticed_without_a_ping(without_pings, server):
    process, connection = server
    assert ask(connection, 1) == 1
    process.kill()
    seconds_until_lost(connection)


def test_a_stopped_server_is_noticed(server):
    process, connection = server
    assert ask(connection, 1) == 1
    stop(process)
    connection.send(MessageKind.CALL, 2, "nobody hears this", timeout_s=LONG_S)
    assert seconds_until_lost(connection) < STOP_NOTICED_S


@pytest.mark.parametrize("end", [subprocess.Popen.kill, stop])
def test_a_client_that_is_gone_or_stopped_is_noticed(end):
    with (
        listening() as listener,
        admitting(listener) as promise,
        worker("connect", listener.address) as process,
        contextlib.closing(promise.result(LONG_S)) as connection,
    ):
        assert connection.receive(timeout_s=LONG_S).payload.take() == "here"
        end(process)
        assert seconds_until_lost(connection) < STOP_NOTICED_S


def test_a_peer_that_holds_the_gil_is_no_dead_peer(server):
    _, connection = server
    held = ("hold the GIL", 7.0)
    assert ask(connection, held) == held
    assert ask(connection, 1) == 1


def test_an_idle_connection_stays(server):
    _, connection = server
    with pytest.raises(TimeoutError):
        connection.receive(timeout_s=7.0)
    assert ask(connection, 1) == 1


def test_a_process_may_end_with_connections_open(server):
    code = (
        "import sys; from tests.rpc.transports.between_hosts.grpc_worker import *; "
        "listener = GrpcListener(ANY_PORT, **arguments()); "
        "import threading; "
        "threading.Thread(target=lambda: listener.accept()(), daemon=True).start(); "
        "c = connect_grpc(listener.address, **arguments(timeout_s=60)); "
        "listener.close(); print('end')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, timeout=LONG_S, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_a_tcp_connection_without_a_word_is_closed():
    with listening() as listener:
        port = int(listener.address.rpartition(":")[2])
        start = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), LONG_S) as silent:
            while silent.recv(4096):
                pass
        assert time.monotonic() - start < LONG_S / 2
