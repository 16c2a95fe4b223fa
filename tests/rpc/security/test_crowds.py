"""Many clients at once, of this user's: who is silent, and who finds no room."""

import contextlib
import os
import resource
import socket
import subprocess
import sys

import pytest

from replicator.errors import ConnectionLostError
from replicator.rpc.client.client import Client
from replicator.rpc.transports.connect import connect
from tests.rpc import attacks
from tests.rpc.transports.ends import LONG_S, wait_until

_LIMIT = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from replicator.rpc.server.server import Server
with Server(address="inproc:").bind("one", lambda: 1):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with attacks.attacked(tmp_path_factory.mktemp("crowded")) as server:
        join(server).close()  # what the first one opens stays
        server.idle = server.descriptors()
        yield server


@pytest.fixture(autouse=True)
def idle(server):
    """Let those of the test before have gone."""
    wait_until(lambda: server.descriptors() <= server.idle + 2)


def join(server):
    return connect(server.unix, secret=server.secret, timeout_s=LONG_S)


def test_half_open_connections_have_less_time_while_others_wait(server):
    """With 2 s for each of 64 at a time these would take 4 s; who joins waits 2 s."""
    with contextlib.ExitStack() as stack:
        for _ in range(130):  # many more do not fit into the backlog
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(server.path)
        join(server).close()


def test_a_client_costs_a_server_two_descriptors(server):
    before = server.descriptors()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            client = Client(server.unix, secret=server.secret, timeout_s=LONG_S)
            stack.callback(client.close)
            assert client.echo(1) == 1
        assert server.descriptors() - before <= 2 * 20 + 2  # two of the server itself
    wait_until(lambda: server.descriptors() <= before + 2)


def refused(server, hard):
    """Leave the server no descriptor, and tell whether a client is told so."""
    pid = server.process.pid
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    first_free = next(number for number in range(1 << 16) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first_free, hard))
    try:
        join(server).close()
    except ConnectionLostError as error:
        return "no file descriptor left" in str(error)
    return False  # one of a client before was closed only now


def is_let_in(server):
    with contextlib.suppress(ConnectionLostError):
        join(server).close()
        return True
    return False


def test_who_finds_no_descriptor_left_is_told_so_and_later_finds_one(server):
    pid = server.process.pid
    _, hard = limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    try:
        wait_until(lambda: refused(server, hard))
        for _ in range(3):
            with pytest.raises(ConnectionLostError, match="no file descriptor left"):
                join(server)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: is_let_in(server))  # it may be at turning others away still


def test_a_server_raises_the_soft_limit_of_descriptors():
    command = [sys.executable, "-c", _LIMIT]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    soft, hard = map(int, told.split())
    assert soft == (min(hard, 1 << 16) if hard >= 0 else 1 << 16)
