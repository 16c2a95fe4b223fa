"""`courier.Server` and `courier.Client`, without a program around them."""

import contextlib
import datetime
import os
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest

from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    AuthenticationError,
    CallTimeoutError,
    ConnectionLostError,
    RemoteError,
)
from replicator.launchpad_bridge.compat.courier_client import Client, address_of
from replicator.launchpad_bridge.compat.courier_server import Server
from replicator.rpc.client.client import list_methods


def fail():
    raise ValueError("why")


@pytest.fixture
def server():
    server = Server("sums")
    server.Bind("add", lambda a, b=100: a + b)
    server.Bind("__call__", lambda: "called")
    server.Bind("fail", fail)
    server.Start()
    yield server
    server.Stop()
    server.Join()


@pytest.fixture
def client(server):
    with contextlib.closing(Client(server.address, call_timeout=60)) as client:
        yield client


def test_functions_are_called_by_name_with_arrays_and_as_futures(client):
    assert client.add(1, 2) == 3
    assert client.add(1) == 101
    np.testing.assert_array_equal(client.add(np.ones(3), b=1), [2, 2, 2])
    assert client() == "called"
    assert client.futures.add(3).result(60) == 103
    assert client.futures().result(60) == "called"


def test_methods_are_listed(client):
    assert list_methods(client) == ["__call__", "add", "fail"]


def test_what_a_function_raises_arrives_as_what_it_is(client):
    with pytest.raises(RemoteError, match="why") as raised:
        client.fail()
    assert isinstance(raised.value, ValueError)


def test_a_function_is_replaced_and_taken_away_while_the_server_runs(server, client):
    server.Bind("add", lambda a: -a)
    assert client.add(1) == -1
    server.Unbind("add")
    with pytest.raises(RemoteError, match="method add not found"):
        client.add(1)
    server.Bind("add", lambda a: a)
    assert client.add(1) == 1


def test_a_name_that_was_not_bound_at_the_start_is_refused(server):
    with pytest.raises(ArgumentError, match=r"got 'late'\. Bind it before"):
        server.Bind("late", int)


def test_a_client_may_be_there_before_its_server():
    server = Server()
    server.Bind("one", lambda: 1)
    with contextlib.closing(Client(server.address, call_timeout=60)) as client:
        future = client.futures.one()
        server.Start()
        assert future.result(60) == 1
        server.Stop()


def test_a_port_is_one_servers_and_a_taken_one_is_refused(server):
    with pytest.raises(AddressInUseError, match=f"got {server.port}"):
        Server(port=server.port)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(AddressInUseError, match="Use another one"):
            Server(port=other.getsockname()[1])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::]", "[::1]", ""])
def test_a_server_is_found_under_each_name_of_this_host(server, host):
    with contextlib.closing(Client(f"{host}:{server.port}")) as client:
        assert client.add(1) == 101


@pytest.mark.parametrize("address", ["192.0.2.1:80", "my_server", "localhost:http"])
def test_what_is_no_port_of_this_host_is_refused(address):
    with contextlib.closing(Client(address)) as client:
        assert client.address == address
        refused = pytest.raises(ArgumentError, match="must be a port of this host, got")
        with refused as told:
            client.method()
    assert address in str(told.value)


def test_addresses_of_rpc_are_taken_as_they_are():
    for address in ("unix:/x/y", "inproc:a,unix:/x/y", "grpc://other:1"):
        assert Client(address).address == address


@pytest.mark.parametrize("seconds", [0.05, datetime.timedelta(milliseconds=50)])
def test_a_deadline_ends_a_call_that_nobody_answers(seconds):
    server = Server()
    client = Client(server.address, call_timeout=seconds)
    timed_out = pytest.raises(CallTimeoutError, match="Deadline Exceeded: `nothing`")
    with contextlib.closing(client), timed_out:
        client.nothing()


def test_a_client_that_does_not_wait_is_told_at_once():
    server = Server()
    client = Client(server.address, wait_for_ready=False)
    told = "`nothing` .* failed to connect to all addresses"
    lost = pytest.raises(ConnectionLostError, match=told)
    with contextlib.closing(client), lost:
        client.nothing()


def test_clients_of_programs_are_instances_of_couriers(client):
    assert isinstance(client, Client)
    assert not isinstance(object(), Client)


def test_a_server_starts_once_and_stops_after_its_start(server):
    with pytest.raises(ArgumentError, match="already started"):
        server.Start()
    other = Server()
    assert not other.has_started
    for call in (other.Stop, other.Join):
        with pytest.raises(ArgumentError, match="not started yet"):
            call()


def test_a_server_that_nobody_has_any_more_gives_its_port_back():
    port = Server().port
    assert Server(port=port).port == port


def test_a_socket_lies_where_only_this_user_can_enter(server):
    path = Path(address_of(server.address).removeprefix("unix:"))
    assert path.exists()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_uid == os.geteuid()


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"courier-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    refused = pytest.raises(AuthenticationError, match="must lie in a directory")
    with contextlib.closing(Client("localhost:1")) as client, refused:
        client.method()
    assert not list(folder.iterdir())
    (folder / "secret").write_bytes(b"x" * 32)
    server = Server()
    server.Bind("one", lambda: 1)
    with pytest.raises(AuthenticationError):
        server.Start()


def test_a_link_in_the_place_of_the_folder_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (tmp_path / f"courier-{os.geteuid()}").symlink_to(mine)
    refused = pytest.raises(AuthenticationError, match="must lie in a directory")
    with contextlib.closing(Client("localhost:1")) as client, refused:
        client.method()
    assert not list(mine.iterdir())
