"""What is no call, ping, hello or error of ours is refused; nothing grows or waits."""

import contextlib
import dataclasses
import enum
import threading
import time
import tracemalloc

import numpy as np
import pytest

from replicator.errors import ConnectionLostError, DecodeError, RemoteError
from replicator.rpc.answers import RAISED
from replicator.rpc.client.client import Client, list_methods
from replicator.rpc.codec import tagged_values
from replicator.rpc.codec.no_argument_calls import NoArgumentCall
from replicator.rpc.codec.registry import Registry
from replicator.rpc.own_methods import HELLO, PROTOCOL
from replicator.rpc.protocols import MessageKind
from replicator.rpc.server.server import Server
from replicator.rpc.transports.connect import connect, listen
from tests.rpc.courier_cases import (
    LONG_S,
    Probe,
    client_of,
    courier,
    serving,
    wait_until,
)
from tests.rpc.transports.ends import SECRET

MANY = range(20_000_000)  # 27 bytes on the way; a list of it takes a gigabyte
CALLS = {
    "nothing": None,
    "no list": 7,
    "too short": ["echo"],
    "a range": range(4),
    "a name that is a number": [3, None, None, 1.0],
    "a name of 16 MB": ["x" * 16_000_000, None, None, 1.0],
    "a name of 257": ["x" * 257, None, None, 1.0],
    "an argument in place of a list": ["echo", 3, None, 1.0],
    "a range of arguments": ["echo", MANY, None, 1.0],
    "an array of arguments": ["echo", np.zeros(3), None, 1.0],
    "names that are numbers": ["echo", None, {3: 4}, 1.0],
    "names in a list": ["echo", None, [("value", 4)], 1.0],
    "a complex time": ["echo", None, None, 1j],
    "a text as time": ["echo", None, None, "soon"],
    "a negative time": ["echo", None, None, -1.0],
    "an endless time": ["echo", None, None, float("inf")],
    "no number as time": ["echo", None, None, float("nan")],
    "a time past every clock": ["echo", None, None, 10**400],
    "a range as hello": [HELLO, MANY, None, 1.0],
    "a size as hello": [HELLO, [1 << 30], None, 1.0],
    "a hello of bytes": [HELLO, [b"x" * (1 << 20)], None, 1.0],
    "a name that is no text in a hello": [HELLO, [MANY], None, 1.0],
}
PINGS = [MANY, [[]], ["1"], {1: 2}, 5, list(range(10_000))]
ERRORS = {
    "nothing": None,
    "an unknown word": ("later", 0.0),
    "a word that is an array": (np.zeros(2), 0.0),
    "a complex time": ("expired", 1j),
    "a time past every clock": ("expired", 10**400),
    "a number that no text can show": 10**5000,
    "an unknown word as a call without arguments": NoArgumentCall(
        "later", None, None, 1.0
    ),
    "a word as a call without arguments": NoArgumentCall("expired", None, None, 1.0),
    "raised and no more": (RAISED, 0.0),
    "a range of names": (RAISED, MANY, "text", "", None, None),
    "names that are numbers": (RAISED, [1], "text", "", None, None),
    "a text that is none": (RAISED, ["ValueError"], 5, "", None, None),
    "an errno that is none": (RAISED, ["OSError"], "text", "", "x", None),
    "attributes in a list": (RAISED, ["ValueError"], "text", "", None, [1]),
    "notes that are a number": (
        *(RAISED, ["ValueError"], "text", "trace", None, {"__notes__": 5}),
    ),
}


@contextlib.contextmanager
def little_memory(most_bytes=64 << 20):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def raw_client(server):
    connection = connect(server.address, secret=SECRET, timeout_s=LONG_S)
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def lying_server(*, welcome=(PROTOCOL, "liar", ()), error=None, reply=None, pong=()):
    """Yield a client of who answers each call with one error, or a reply."""
    listener = listen("unix:", secret=SECRET)
    calls = []

    def serve(connection):
        while True:
            kind, call_id, payload = connection.receive(timeout_s=None)
            value, answer = payload.take(), (MessageKind.ERROR, call_id, error)
            if kind not in (MessageKind.PING, MessageKind.CALL):
                continue  # it is told that a call is given up, or that the client goes
            if kind == MessageKind.PING:
                answer = MessageKind.PONG, call_id, pong
            elif value[0] == HELLO:
                answer = MessageKind.REPLY, call_id, welcome
            elif reply is not None:
                answer = MessageKind.REPLY, call_id, reply
            if kind == MessageKind.CALL:  # how often it is pinged depends on the load
                calls.append(value)
            if kind == MessageKind.PING or value[0] != "never":
                connection.send(*answer, timeout_s=LONG_S)

    def accept():
        while True:
            try:
                meet = listener.accept()
            except ConnectionLostError:
                return
            with contextlib.suppress(ConnectionLostError):
                serve(meet())

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    client = Client(listener.address, secret=SECRET, timeout_s=LONG_S, heartbeat_s=0.05)
    try:
        with client:
            yield client, calls
    finally:
        listener.close()
        thread.join(LONG_S)


@pytest.mark.parametrize("body", CALLS.values(), ids=CALLS)
def test_what_is_no_call_is_refused_at_once_and_its_connection_lives(body):
    with serving("unix", pool_size=1) as server, raw_client(server) as raw:
        started_s = time.monotonic()
        with little_memory(128 << 20):
            raw.send(MessageKind.CALL, 1, body, timeout_s=LONG_S)
            kind, call_id, payload = raw.receive(timeout_s=LONG_S)
        assert (kind, call_id) == (MessageKind.ERROR, 1)
        assert payload.take()[1][0] == "DecodeError"
        assert time.monotonic() - started_s < LONG_S / 2
        raw.send(MessageKind.CALL, 2, ["echo", ["fine"], None, 1.0], timeout_s=LONG_S)
        assert raw.receive(timeout_s=LONG_S).payload.take() == "fine"
        assert server._service.pool.num_running == 0


@pytest.mark.parametrize("value", PINGS, ids=lambda value: repr(value)[:20])
def test_what_is_no_ping_ends_its_connection_and_takes_no_memory(value):
    with serving("unix") as server, raw_client(server) as raw:
        with little_memory():
            raw.send(MessageKind.PING, 1, value, timeout_s=LONG_S)
            with pytest.raises(ConnectionLostError):
                raw.receive(timeout_s=LONG_S)
        with raw_client(server) as other:
            other.send(MessageKind.PING, 1, [5], timeout_s=LONG_S)
            assert other.receive(timeout_s=LONG_S).kind == MessageKind.PONG


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_what_is_no_error_is_raised_as_that_and_not_asked_for_again(error):
    with lying_server(error=error) as (client, calls), little_memory():
        with pytest.raises(DecodeError, match="cannot be read"):
            client.method()
        with pytest.raises(DecodeError, match="cannot be read"):
            client.futures.method().result(LONG_S)
    assert [name for name, *_ in calls] == [HELLO, "method", "method"]


def test_attributes_of_an_error_hide_nothing_that_raises_it():
    told = (RAISED, ["ValueError"], "text", "trace", None, {"add_note": 5, "code": 7})
    with (
        lying_server(error=told) as (client, _),
        pytest.raises(RemoteError, match="text") as caught,
    ):
        client.method()
    assert vars(caught.value)["code"] == 7
    assert "trace" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "welcome",
    [
        None,
        5,
        (PROTOCOL, "x"),
        (PROTOCOL, "x", MANY),
        (PROTOCOL, 5, ()),
        ("1", "x", ()),
    ],
    ids=repr,
)
def test_who_gives_no_welcome_is_not_called(welcome):
    with lying_server(welcome=welcome) as (client, calls), little_memory():
        for timeout_s in (0.2, 2.0, 20.0):  # a busy machine may not greet it in time
            with pytest.raises(TimeoutError, match="no server was ready"):
                client.call("method", timeout_s=timeout_s)
            if calls:
                break
        assert {name for name, *_ in calls} == {HELLO}


@pytest.mark.parametrize("names", [[f"loss/{n}" for n in range(5_000)], ["x" * 300]])
def test_a_call_may_have_as_many_named_arguments_as_its_user_likes(names):
    class Writer:
        def write(self, **metrics):
            return len(metrics)

    with serving("unix", Writer()) as server, client_of(server) as client:
        assert client.write(**dict.fromkeys(names, 1.0)) == len(names)


def test_names_of_methods_are_names():
    with (
        lying_server(reply=MANY) as (client, _),
        little_memory(),
        pytest.raises(DecodeError, match="as its kind has it"),
    ):
        list_methods(client)


@pytest.mark.parametrize("pong", [None, MANY, [1], [[1, 2]], [[1, "runs", 1j]], 3])
def test_what_is_no_pong_ends_the_connection(pong):
    with (
        lying_server(pong=pong) as (client, _),
        little_memory(),
        pytest.raises(ConnectionLostError, match="may have run"),
    ):
        client.never()


def test_a_registered_flag_does_not_grow_by_what_arrives():
    ours, theirs = Registry(), Registry()
    known = ours.register(enum.IntFlag("Wish", ["FAST", "EXACT"]))
    sent = theirs.register(enum.IntFlag("Wish", [f"W{bit}" for bit in range(16)]))
    with (
        Server(Probe(), address="unix:", secret=SECRET, registry=ours) as server,
        Client(server.address, secret=SECRET, registry=theirs) as client,
    ):
        assert client.echo(sent(3)) == sent(3)
        before = len(known._value2member_map_)
        for bits in (5, 1 << 20, -1):
            with pytest.raises(DecodeError, match="bits that its members name"):
                client.echo(sent(bits))
        assert len(known._value2member_map_) == before


def test_a_registered_flag_does_not_grow_without_bound_by_its_own_members(monkeypatch):
    monkeypatch.setattr(tagged_values, "_MOST_FLAGS", 40)
    ours, theirs = Registry(), Registry()
    wish = enum.Flag("Wish", [f"W{bit}" for bit in range(16)])
    ours.register(wish)
    sent = theirs.register(enum.IntFlag("Wish", [f"W{bit}" for bit in range(16)]))
    with (
        Server(Probe(), address="unix:", secret=SECRET, registry=ours) as server,
        Client(server.address, secret=SECRET, registry=theirs) as client,
    ):
        for bits in range(1, 400):
            with contextlib.suppress(DecodeError):
                client.echo(sent(bits))
        with pytest.raises(DecodeError, match="in 40 combinations"):
            client.echo(sent(399))
        assert client.echo(sent(3)) == sent(3)
    assert len(wish._value2member_map_) == 40


def test_a_reply_that_memory_does_not_suffice_for_leaves_its_place(caplog):
    registry = Registry()

    @registry.register
    @dataclasses.dataclass
    class Huge:
        size: int = 5

        def __getattribute__(self, name):
            if name == "size":
                raise MemoryError
            return super().__getattribute__(name)

    class Node:
        def huge(self):
            return Huge()

        def small(self):
            return 1

    with (
        Server(
            Node(), address="unix:", secret=SECRET, registry=registry, pool_size=1
        ) as server,
        Client(server.address, secret=SECRET, heartbeat_s=0.05) as client,
    ):
        with pytest.raises(ConnectionLostError, match="knows nothing of the call"):
            client.huge()
        assert client.small() == 1
        wait_until(lambda: server._service.calls_left == 0)


@pytest.mark.parametrize("time_s", [np.float32(20), 20, np.float64(20)])
def test_a_time_may_be_any_number(time_s):
    with courier("unix") as (client, _):
        assert client.call("echo", [1], timeout_s=time_s) == 1
