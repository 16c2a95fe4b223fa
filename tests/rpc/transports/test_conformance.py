"""All transports keep the same laws: same values, same errors, same deadlines."""

import gc
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from replicator.errors import (
    CallTimeoutError,
    ConnectionLostError,
    EncodeError,
    MessageTooLargeError,
)
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports.connect import connect
from replicator.rpc.transports.frames import CHECKED_BODY_BYTES, READ_BYTES
from replicator.rpc.transports.same_host.shared_memory import SHARED_FROM_BYTES
from tests.rpc.transports.ends import (
    LONG_S,
    SECRET,
    SHORT_S,
    TRANSPORTS,
    connected,
    listening,
    pass_on,
    wait_until,
)

ENCODED = [name for name, row in TRANSPORTS.items() if row.encodes]
VALUES = {
    "nothing": None,
    "a call": ("method", (1, 2.5, "x"), {"flag": True}),
    "text": "naïve 😀",
    "long bytes": b"ab" * 100_000,
    "an empty array": np.zeros((0, 3), np.float32),
    "a bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
    "fortran order": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "a tree": {"a": [np.ones(3), {"b": np.zeros(70_000)}], "c": (np.int8(3), None)},
    "a long head": "é" * 50_000,
}
# On both sides of where a message is sent in another way.
SIZES = [
    size + difference
    for size in (4096, CHECKED_BODY_BYTES, READ_BYTES, SHARED_FROM_BYTES, 1 << 20)
    for difference in (-1, 0, 1)
] + [1, 3_000_001]


@pytest.fixture(params=TRANSPORTS)
def row(request):
    return TRANSPORTS[request.param]


@pytest.fixture
def listener(row):
    with listening(row) as listener:
        yield listener


@pytest.fixture
def ends(listener, row):
    with connected(listener, row.limits) as ends:
        yield ends


def encoding_rows(function):
    return pytest.mark.parametrize(
        "row", [TRANSPORTS[n] for n in ENCODED], ids=ENCODED
    )(function)


def send_until_full(connection, size):
    """Send until nobody reads; return how many were sent, and the error."""
    for number in range(3000):
        try:
            connection.send(MessageKind.CALL, number, bytes(size), timeout_s=SHORT_S)
        except CallTimeoutError as error:
            return number, error
    raise AssertionError("somebody read")


# Values.


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_arrive_as_they_were_sent(ends, value):
    client, server = ends
    np.testing.assert_equal(pass_on(client, server, value), value)
    np.testing.assert_equal(pass_on(server, client, value), value)


def test_arrays_of_every_size_arrive(ends):
    everything = np.random.default_rng(0).integers(0, 256, max(SIZES), np.uint8)
    for size in SIZES:
        got = pass_on(*ends, everything[:size])
        np.testing.assert_array_equal(got, everything[:size])


def test_many_arrays_of_odd_sizes_arrive_in_one_message(ends):
    value = [np.arange(size, dtype=np.int16) for size in range(1, 30_000, 1777)]
    np.testing.assert_equal(pass_on(*ends, value), value)


def test_kind_and_call_id_arrive(ends):
    client, server = ends
    for kind, call_id in (
        (MessageKind.PING, 0),
        (200, 2**64 - 1),
        (MessageKind.GOODBYE, 2**40),
    ):
        assert pass_on(client, server, None, kind=kind, call_id=call_id) is None


def test_messages_arrive_in_order(ends):
    client, server = ends
    sizes = [1, 5_000, 20_000, 300_000, 70_000, 2] * 20
    with ThreadPoolExecutor(1) as pool:
        arrays = [np.full(size, index) for index, size in enumerate(sizes)]
        sent = pool.submit(send_all, client, arrays)
        for index, array in enumerate(arrays):
            message = server.receive(timeout_s=LONG_S)
            assert message.call_id == index
            np.testing.assert_array_equal(message.payload.take(), array)
        sent.result()


def send_all(connection, values, first_id=0):
    for index, value in enumerate(values):
        connection.send(MessageKind.CALL, first_id + index, value, timeout_s=LONG_S)


def test_many_senders_do_not_mix_their_messages(ends):
    client, server = ends
    arrays = [np.full(size, size) for size in (1, 3_000, 40_000, 200_000)] * 6
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(send_all, client, arrays, 1000 * n) for n in range(8)]
        seen = {n: [] for n in range(8)}
        for _ in range(8 * len(arrays)):
            message = server.receive(timeout_s=LONG_S)
            sender, index = divmod(message.call_id, 1000)
            np.testing.assert_array_equal(message.payload.take(), arrays[index])
            seen[sender].append(index)
        for one in sent:
            one.result()
    assert all(order == list(range(len(arrays))) for order in seen.values())


def test_both_ends_may_send_at_once(ends):
    arrays = [np.full(size, size) for size in (300_000, 5, 1_000_000, 30_000)] * 3

    def talk(connection):
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send_all, connection, arrays)
            for array in arrays:
                got = connection.receive(timeout_s=LONG_S).payload.take()
                np.testing.assert_array_equal(got, array)
            sent.result()

    with ThreadPoolExecutor(2) as pool:
        for end in [pool.submit(talk, end) for end in ends]:
            end.result()


@encoding_rows
def test_num_bytes_is_what_was_sent(ends):
    client, server = ends
    with ThreadPoolExecutor(1) as pool:
        promise = pool.submit(client.send, 1, 1, np.zeros(50_000), timeout_s=LONG_S)
        payload = server.receive(timeout_s=LONG_S).payload
        assert payload.num_bytes == promise.result() >= 400_000


@encoding_rows
def test_arrays_arrive_read_only(ends):
    for size in SIZES:
        got = pass_on(*ends, np.zeros(size, np.uint8))
        assert not got.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            got.flags.writeable = True


@encoding_rows
def test_arrays_arrive_aligned(ends):
    for size in (3_000, 5_000, 20_000, 100_000, 300_000):
        got = pass_on(*ends, {"x": np.zeros(3, np.int8), "y": np.zeros(size)})
        assert got["y"].flags.aligned


@encoding_rows
def test_what_the_sender_changes_later_does_not_arrive(ends):
    for size in SIZES:
        value = np.zeros(size, np.uint8)
        got = pass_on(*ends, value)
        value[:] = 1
        assert not got.any()


def test_arrays_outlive_the_connection(listener, row):
    with connected(listener, row.limits) as ends:
        got = [pass_on(*ends, np.full(size, 7, np.uint8)) for size in SIZES]
    gc.collect()
    assert [int(array.sum()) for array in got] == [7 * size for size in SIZES]


def test_arrays_are_not_overwritten_while_they_are_seen(ends):
    kept = [pass_on(*ends, np.full(300_000, n, np.uint8)) for n in range(12)]
    assert [int(array[0]) for array in kept] == list(range(12))
    assert all((array == array[0]).all() for array in kept)


# Errors.


@encoding_rows
def test_what_cannot_be_sent_raises_and_harms_nothing(ends):
    client, server = ends
    with pytest.raises(EncodeError):
        client.send(MessageKind.CALL, 1, {"f": lambda: 0}, timeout_s=LONG_S)
    assert pass_on(client, server, "next") == "next"


@encoding_rows
@pytest.mark.parametrize("size", [100_001, 1_000_000])
def test_too_large_a_message_raises_and_harms_nothing(row, size):
    limits = {"message_bytes": 100_000}
    with (
        listening(row, **limits) as listener,
        connected(listener, MessageLimits(**limits)) as (client, server),
    ):
        for sender, receiver in ((client, server), (server, client)):
            with pytest.raises(MessageTooLargeError, match="100000"):
                sender.send(MessageKind.CALL, 1, bytes(size), timeout_s=LONG_S)
            assert pass_on(sender, receiver, "next") == "next"


def test_a_receive_without_a_message_ends_in_time_and_goes_on(ends):
    client, server = ends
    for timeout_s in (0, 0.001, SHORT_S):
        start = time.monotonic()
        with pytest.raises(CallTimeoutError):
            server.receive(timeout_s=timeout_s)
        assert timeout_s <= time.monotonic() - start + 1e-3 < LONG_S / 2
    assert pass_on(client, server, "late") == "late"


def test_a_send_to_who_does_not_read_ends_in_time(ends):
    client, _ = ends
    start = time.monotonic()
    number, error = send_until_full(client, 100_000)
    assert time.monotonic() - start < LONG_S
    assert number > 0
    assert "read" in str(error)


def test_whole_messages_arrive_at_a_slow_reader(ends):
    client, server = ends
    number, _ = send_until_full(client, 30_000)
    for index in range(number):
        message = server.receive(timeout_s=LONG_S)
        assert (message.call_id, len(message.payload.take())) == (index, 30_000)


# Ends.


@pytest.mark.parametrize("end", [0, 1])
def test_closing_wakes_who_receives(ends, end):
    connection = ends[end]
    with ThreadPoolExecutor(1) as pool:
        promise = pool.submit(connection.receive, timeout_s=LONG_S)
        with pytest.raises(TimeoutError):
            promise.result(0.02)
        connection.close()
        with pytest.raises(ConnectionLostError):
            promise.result(LONG_S)


def test_the_other_end_learns_that_a_connection_is_closed(ends):
    client, server = ends
    client.close()
    with pytest.raises(ConnectionLostError):
        server.receive(timeout_s=LONG_S)


def test_messages_before_the_close_arrive(ends):
    client, server = ends
    for index in range(5):
        client.send(MessageKind.CALL, index, "x", timeout_s=LONG_S)
    client.close()
    assert [server.receive(timeout_s=LONG_S).call_id for _ in range(5)] == [*range(5)]
    with pytest.raises(ConnectionLostError):
        server.receive(timeout_s=LONG_S)


def test_a_closed_connection_sends_and_receives_no_more(ends):
    client, _ = ends
    client.close()
    client.close()
    for size in (1, 500_000):
        with pytest.raises(ConnectionLostError):
            client.send(MessageKind.CALL, 1, bytes(size), timeout_s=LONG_S)
    with pytest.raises(ConnectionLostError):
        client.receive(timeout_s=LONG_S)


def test_sending_to_who_is_gone_raises(ends):
    client, server = ends
    server.close()
    with pytest.raises(ConnectionLostError):
        send_all(client, [bytes(10_000)] * 1000)


def test_errors_name_the_other_end(ends):
    client, server = ends
    server.close()
    with pytest.raises(ConnectionLostError) as caught:
        client.receive(timeout_s=LONG_S)
    assert client.peer in str(caught.value)


def test_peers_name_the_address(ends, listener):
    place = listener.address.partition(":")[2].removeprefix("//")
    assert place in ends[0].peer
    assert ends[1].peer


def test_closing_a_listener_wakes_who_accepts(listener):
    with ThreadPoolExecutor(1) as pool:
        promise = pool.submit(listener.accept)
        with pytest.raises(TimeoutError):
            promise.result(0.02)
        listener.close()
        listener.close()
        with pytest.raises(ConnectionLostError):
            promise.result(LONG_S)


def test_nobody_connects_to_a_closed_listener(listener):
    listener.close()
    with pytest.raises(ConnectionLostError):
        connect(listener.address, secret=SECRET, timeout_s=2)


def test_a_listener_has_many_clients(listener, row):
    with (
        connected(listener, row.limits) as first,
        connected(listener, row.limits) as two,
    ):
        assert pass_on(*first, 1) == 1
        assert pass_on(*two, 2) == 2
        assert pass_on(*first[::-1], 3) == 3


# Waiting for messages in other ways.


def test_has_received_tells_what_was_read_already(ends):
    client, server = ends
    assert not server.has_received()
    for index in range(4):
        client.send(MessageKind.CALL, index, index, timeout_s=LONG_S)
    received = []
    while len(received) < 4:
        received.append(server.receive(timeout_s=LONG_S).call_id)
        while server.has_received():
            received.append(server.receive(timeout_s=0).call_id)
    assert received == [0, 1, 2, 3]


def test_fileno_tells_when_to_receive(ends):
    client, server = ends
    if server.fileno() is None:
        return
    assert select.select([server.fileno()], [], [], 0)[0] == []
    client.send(MessageKind.CALL, 1, None, timeout_s=LONG_S)
    assert select.select([server.fileno()], [], [], LONG_S)[0]


def own_threads():
    return {thread for thread in threading.enumerate() if "grpc" not in thread.name}


def test_no_thread_is_left(row):
    before = own_threads()
    with listening(row) as listener, connected(listener, row.limits) as ends:
        pass_on(*ends, np.ones(1_000_000))
    wait_until(lambda: own_threads() <= before)
