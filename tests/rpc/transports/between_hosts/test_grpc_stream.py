"""gRPC carries messages of any size, in order, and its connections end well."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator.errors import (
    AddressInUseError,
    ArgumentError,
    CallTimeoutError,
    ConnectionLostError,
)
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports import network_rules
from replicator.rpc.transports.between_hosts.chunk_queues import (
    CHUNK_BYTES,
    WAITING_BYTES,
)
from replicator.rpc.transports.between_hosts.grpc_stream import (
    GrpcListener,
    connect_grpc,
)
from tests.rpc.transports.between_hosts.grpc_ends import (
    arguments,
    connected,
    listening,
)
from tests.rpc.transports.ends import LONG_S, SHORT_S, pass_on, wait_until


@pytest.fixture
def listener():
    with listening() as listener:
        yield listener


@pytest.fixture
def ends(listener):
    with connected(listener) as ends:
        yield ends


def send_until_full(connection, size):
    """Send until nobody reads; return how many were sent, and the error."""
    for number in range(100):
        try:
            connection.send(MessageKind.CALL, number, bytes(size), timeout_s=SHORT_S)
        except CallTimeoutError as failure:
            return number, failure
    raise AssertionError("somebody read")


# Messages.


@pytest.mark.parametrize(
    "num_bytes",
    [0, 1, CHUNK_BYTES - 200, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17],
)
def test_arrays_of_any_size_arrive_both_ways(ends, num_bytes):
    value = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    for sender, receiver in (ends, ends[::-1]):
        np.testing.assert_array_equal(pass_on(sender, receiver, value), value)


def test_a_head_larger_than_a_chunk_arrives(ends):
    value = [f"{number}" for number in range(400_000)]
    assert pass_on(*ends, value) == value


def test_a_reader_that_does_not_read_stops_its_sender(ends):
    sent, failure = send_until_full(ends[0], 1 << 20)
    assert "did not read" in str(failure)
    # Two queues, and what the windows of HTTP/2 take.
    assert sent << 20 < 2 * WAITING_BYTES + (16 << 20)


def test_a_connection_survives_a_message_that_did_not_begin_to_leave(ends):
    sent, failure = send_until_full(ends[0], 500_000)
    assert "Nothing of this message was sent" in str(failure)
    got = [ends[1].receive(timeout_s=LONG_S).call_id for _ in range(sent)]
    assert got == list(range(sent))
    assert pass_on(*ends, "still here") == "still here"


def test_a_message_that_left_in_part_ends_the_connection(ends):
    client, _ = ends
    client.send(MessageKind.CALL, 1, bytes(2 * WAITING_BYTES), timeout_s=LONG_S)
    for timeout_s in (SHORT_S, 1.0, 10.0):  # it may not begin to leave in time
        with pytest.raises(CallTimeoutError) as late:
            client.send(MessageKind.CALL, 2, bytes(100 << 20), timeout_s=timeout_s)
        if "Nothing of this message was sent" not in str(late.value):
            break
    assert "The connection was closed" in str(late.value)
    with pytest.raises(ConnectionLostError):
        client.send(MessageKind.CALL, 3, 0, timeout_s=SHORT_S)


# Ends.


@pytest.mark.parametrize("closing", [0, 1])
def test_what_was_sent_arrives_before_the_end(ends, closing):
    ours, theirs = ends[closing], ends[1 - closing]
    for number in range(50):
        ours.send(MessageKind.REPLY, number, bytes(100), timeout_s=LONG_S)
    theirs.send(MessageKind.CALL, 1, bytes(WAITING_BYTES), timeout_s=LONG_S)  # unread
    ours.close()
    assert [theirs.receive(timeout_s=LONG_S).call_id for _ in range(50)] == [*range(50)]
    with pytest.raises(ConnectionLostError, match="is gone"):
        theirs.receive(timeout_s=LONG_S)


def test_closing_is_quick_though_the_other_end_reads_nothing(ends):
    send_until_full(ends[0], 1 << 20)
    start = time.monotonic()
    ends[0].close()
    assert time.monotonic() - start < LONG_S / 2


def test_connections_outlive_their_listener(ends, listener):
    listener.close()
    assert pass_on(*ends, [1]) == [1]


def test_a_closed_listener_tells_who_accepts_and_frees_its_port(ends, listener):
    port = int(listener.address.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.accept)
        listener.close()
        with pytest.raises(ConnectionLostError, match="was closed"):
            waiting.result(LONG_S)
    with pytest.raises(ConnectionLostError):
        listener.accept()
    with listening(f"grpc://127.0.0.1:{port}") as again, connected(again) as others:
        assert pass_on(*others, 1) == pass_on(*ends, 1)


def test_nothing_is_left_behind_by_connections(listener):
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(3):  # what gRPC keeps, it makes once
        with connected(listener):
            pass
    wait_until(lambda: not _own_threads())
    before = count()
    for _ in range(10):
        with connected(listener) as ends:
            pass_on(*ends, 1)
    wait_until(lambda: count() <= before)


def _own_threads():
    return [t for t in threading.enumerate() if t.name.startswith("rpc-stream")]


# Addresses.


def test_nobody_there_is_told_at_once():
    with listening() as listener:
        address = listener.address
    start = time.monotonic()
    with pytest.raises(ConnectionLostError, match=f"No server answers at {address}"):
        connect_grpc(address, **arguments(timeout_s=LONG_S))
    assert time.monotonic() - start < LONG_S / 2


def test_a_port_in_use_is_refused_with_its_owner(listener):
    with pytest.raises(AddressInUseError, match=f"process {os.getpid()} listens"):
        GrpcListener(listener.address, **arguments())


def test_a_host_that_is_not_this_one_cannot_be_listened_at():
    with pytest.raises(ArgumentError, match=r"one of this host.*192\.0\.2\.1"):
        GrpcListener("grpc://192.0.2.1:0", **arguments(insecure=True))


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", "127.0.0.1"),
        ("[::1]", "[::1]"),
        ("127.0.0.2", "127.0.0.2"),
    ],
)
def test_every_name_of_loopback_serves(host, bound):
    with listening(f"grpc://{host}:0") as listener, connected(listener) as ends:
        assert listener.address.startswith(f"grpc://{bound}:")
        assert pass_on(*ends, 1) == 1


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "node-1", "[2001:db8::1]", "127.0.0.1.nip"]
)
def test_beyond_loopback_tls_is_needed(host):
    address = f"grpc://{host}:5000"
    with pytest.raises(ArgumentError, match="replicator certificates"):
        GrpcListener(address, **arguments())
    with pytest.raises(ArgumentError, match="insecure=True"):
        connect_grpc(address, **arguments(timeout_s=1))


def test_insecure_says_so_in_the_log_once(caplog):
    network_rules._warn_once.cache_clear()
    places = [
        network_rules.permitted_place("grpc://node-1:5", has_tls=False, insecure=True)
        for _ in range(3)
    ]
    assert places[0].host == "node-1"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "without TLS" in caplog.text


@pytest.mark.parametrize("address", ["unix:/tmp/x", "inproc:x"])
def test_other_addresses_are_refused(address):
    with pytest.raises(ArgumentError, match="grpc://host:port"):
        connect_grpc(address, **arguments(timeout_s=1))


def test_a_proxy_of_the_environment_is_not_asked(listener, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with connected(listener) as ends:
        assert pass_on(*ends, 1) == 1
