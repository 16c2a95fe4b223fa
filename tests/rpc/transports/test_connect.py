"""The nearest address that works is taken; what is missing is told with its remedy."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.errors import ArgumentError, AuthenticationError, ConnectionLostError
from replicator.rpc.security.secret import Secret
from replicator.rpc.transports.between_hosts.chunked_connection import ChunkedConnection
from replicator.rpc.transports.connect import connect, listen
from replicator.rpc.transports.in_process import InProcessConnection
from replicator.rpc.transports.same_host.unix_socket import UnixConnection
from tests.rpc.transports.ends import (
    LONG_S,
    SECRET,
    TRANSPORTS,
    listening,
)

ORDER = (InProcessConnection, UnixConnection, ChunkedConnection)


@pytest.fixture
def listeners():
    names = ("in-process", "unix", "grpc")
    listeners = {name: TRANSPORTS[name].listen() for name in names}
    yield listeners
    for listener in listeners.values():
        listener.close()


def kind_of_connection(listeners, address):
    """Connect while all accept; return the type that comes of it."""
    with ThreadPoolExecutor(3) as pool:
        promises = [pool.submit(lambda one=one: one.accept()()) for one in listeners]
        client = connect(address, secret=SECRET, timeout_s=LONG_S)
        client.close()
        for listener in listeners:
            listener.close()
        for promise in promises:
            if promise.exception(LONG_S) is None:
                promise.result().close()
    return type(client)


@pytest.mark.parametrize("nearest", [0, 1, 2])
def test_the_nearest_is_taken(listeners, nearest):
    names = list(listeners)
    for name in names[:nearest]:
        listeners[name].close()
    address = ",".join(listener.address for listener in listeners.values())
    found = kind_of_connection([listeners[n] for n in names[nearest:]], address)
    assert found is ORDER[nearest]


def test_a_dead_socket_is_passed_over(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "socket").touch()
    with listening(TRANSPORTS["grpc"]) as listener:
        address = f"unix:{tmp_path}/socket,{listener.address}"
        assert kind_of_connection([listener], address) is ChunkedConnection


def test_a_wrong_secret_is_not_tried_elsewhere(listeners):
    unix, grpc = listeners["unix"], listeners["grpc"]
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: unix.accept()())
        with pytest.raises(AuthenticationError):
            connect(
                f"{unix.address},{grpc.address}",
                secret=Secret.generate(),
                timeout_s=LONG_S,
            )
        assert isinstance(served.exception(LONG_S), AuthenticationError)


def test_no_way_is_told_with_all_that_was_tried(tmp_path):
    tmp_path.chmod(0o700)
    for name in ("one", "two"):
        (tmp_path / name).touch()
    address = f"unix:{tmp_path}/one,unix:{tmp_path}/two"
    with pytest.raises(ConnectionLostError, match=r"(?s)No way to.*one.*two"):
        connect(address, secret=SECRET, timeout_s=LONG_S)


def test_nothing_here_is_told_as_such():
    with pytest.raises(ConnectionLostError, match="Nobody listens at inproc:x,unix:/y"):
        connect("inproc:x,unix:/y", secret=SECRET)


def test_grpc_wants_a_secret(monkeypatch):
    monkeypatch.delenv("REPLICATOR_RPC_SECRET_FILE", raising=False)
    monkeypatch.delenv("REPLICATOR_RPC_SECRET_FD", raising=False)
    for function in (connect, listen):
        with pytest.raises(ArgumentError, match="`secret` must be given for grpc"):
            function("grpc://127.0.0.1:1")


def test_a_missing_package_is_told_with_its_remedy(monkeypatch):
    monkeypatch.delitem(
        sys.modules, "replicator.rpc.transports.between_hosts.grpc_stream"
    )
    package = importlib.import_module("replicator.rpc.transports.between_hosts")
    monkeypatch.delattr(package, "grpc_stream")
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(ImportError, match=r"'grpc'.*jax-replicator\[grpc\]"):
        connect("grpc://127.0.0.1:1", secret=SECRET)
