"""A forked child has its parent's clients and servers, and harms none of them."""

import contextlib
import os
import pickle
import select
import signal
import traceback

import numpy as np
import pytest

from replicator.errors import ConnectionLostError, RpcError
from replicator.rpc.transports.same_host.sealed_memory import IS_AVAILABLE
from tests.rpc.courier_cases import LONG_S, client_of, courier, serving
from tests.rpc.transports.ends import TRANSPORTS, connected, listening, pass_on

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    pytest.mark.filterwarnings("ignore:.*fork"),
]


def in_child(function):
    """Return what a function returns in a forked child, or its error's text."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = function()
        except RpcError as error:
            found = f"{type(error).__name__}: {error}"
        except BaseException:
            found = traceback.format_exc()
        os.write(writes, pickle.dumps(found))
        os._exit(0)
    os.close(writes)
    try:
        assert select.select([reads], [], [], LONG_S)[0], "the child hangs"
        return pickle.loads(os.read(reads, 1 << 16))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)


@contextlib.contextmanager
def living_child():
    """Have a child that does nothing."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"here")
        while True:
            signal.pause()
    try:
        assert os.read(reads, 4) == b"here"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("transport", ["in-process", "unix", "grpc"])
def test_a_client_of_the_parent_says_so_in_the_child(transport):
    with courier(transport) as (client, _):
        assert client.echo(1) == 1
        for call in (client.noop, lambda: client.futures.noop().result(LONG_S)):
            told = in_child(call)
            assert told.startswith("RpcError: The client of")
            assert "Make a new `Client` here" in told
        assert client.echo(np.arange(50_000)).sum() == 1_249_975_000


def test_a_future_of_the_parent_says_so_in_the_child():
    with courier("unix") as (client, probe):
        future = client.futures.hold("held")
        assert probe.started.acquire(timeout=LONG_S)
        assert "was forked" in in_child(lambda: future.result(LONG_S))
        probe.go_on.set()
        assert future.result(LONG_S) == "held"


def test_a_client_made_in_the_child_calls_the_parent():
    with courier("unix") as (client, _), serving("unix") as other:
        assert client.echo(1) == 1

        def call():
            with client_of(other) as own:
                return own.echo(2)

        assert in_child(call) == 2


def test_closing_a_client_in_the_child_leaves_the_parents_open():
    with courier("unix") as (client, _):
        assert client.echo(1) == 1
        link = client._calls.connector.link
        in_child(client.close)
        assert client.echo(2) == 2
        assert client._calls.connector.link is link


def test_a_server_of_the_parent_has_stopped_in_the_child():
    with serving("unix") as server, client_of(server) as client:
        path = server.address.removeprefix("unix:")

        def stop():
            server.stop()
            return server.wait(0)

        assert in_child(stop) is True
        assert os.path.exists(path)
        assert client.echo(1) == 1


def test_a_child_does_not_keep_the_path_of_its_parents_server(tmp_path):
    tmp_path.chmod(0o700)
    address = f"unix:{tmp_path}/socket"
    row = type(TRANSPORTS["unix"])(address=address)
    listener = row.listen()
    with living_child():
        listener.drop_after_fork()  # as if it died: nothing is removed
        row.listen().close()


def test_in_process_servers_are_not_in_the_child():
    with serving("in-process") as server:

        def call():
            with client_of(server, wait_for_ready=False) as own:
                return own.noop()

        assert in_child(call).startswith("ConnectionLostError: ")


@pytest.mark.skipif(not IS_AVAILABLE, reason="no memfd here")
def test_what_dies_in_the_child_is_not_released_in_the_parent():
    with listening(TRANSPORTS["unix"]) as listener, connected(listener) as ends:
        held = [pass_on(*ends, np.full(50_000, 1.0))]
        in_child(held.clear)
        for value in range(2, 6):
            pass_on(*ends, np.full(50_000, float(value)))
        assert set(held[0]) == {1.0}


def test_the_end_of_a_parent_is_seen_though_a_child_lives():
    with (
        listening(TRANSPORTS["unix"]) as listener,
        connected(listener) as ends,
        living_child(),
    ):
        ends[1]._socket.close()  # as if it was killed: no `shutdown`
        with pytest.raises(ConnectionLostError):
            ends[0].receive(timeout_s=LONG_S)
