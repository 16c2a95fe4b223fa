"""A connection meets broken peers: each ends in a bounded time, with its name."""

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import replicator
from replicator.errors import CallTimeoutError, ConnectionLostError
from replicator.rpc.codec.codec import encode
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.protocols import MessageKind
from replicator.rpc.transports.frames import (
    HEADER_BYTES,
    Where,
    frame_with_buffers,
    frame_with_shared_body,
    frame_without_buffers,
    lay_out,
)
from replicator.rpc.transports.same_host.unix_socket import UnixConnection
from tests.rpc.transports.ends import LONG_S, SHORT_S, raw_peer, wait_until


def frame_of(value, call_id=5):
    head, buffers, _ = encode(value)
    if not buffers:
        return frame_without_buffers(MessageKind.CALL, call_id, head)
    layout = lay_out(buffers)
    return b"".join(frame_with_buffers(MessageKind.CALL, call_id, head, layout=layout))


def flipped(frame, at):
    changed = bytearray(frame)
    changed[at] ^= 0xFF
    return bytes(changed)


SMALL = frame_of("hello")
ARRAY = frame_of(np.arange(12_000))
WHERE = Where(0, 0, 0, 1)
BROKEN = {
    "no frame": (b"GET / HTTP/1.1\r\n\r\n" * 3, "RPLF"),
    "a corrupted head": (flipped(SMALL, HEADER_BYTES + 2), "checksum"),
    "a corrupted checksum": (flipped(SMALL, -1), "checksum"),
    "a corrupted head before an array": (flipped(ARRAY, HEADER_BYTES), "checksum"),
    "a lying size of the head": (flipped(SMALL, 19), "limit|at most"),
    "a lying size of the body": (flipped(SMALL, 27), "limit|at most"),
    "shared memory that there is not": (
        frame_with_shared_body(MessageKind.CALL, 1, b"x", num_bytes=9, where=WHERE),
        "Shared memory",
    ),
}


def soon(function, *args, **kwargs):
    """Call what must raise at once; return the text of the error."""
    start = time.monotonic()
    with pytest.raises(ConnectionLostError) as caught:
        function(*args, **kwargs)
    assert time.monotonic() - start < LONG_S / 2
    return str(caught.value)


# What is broken.


@pytest.mark.parametrize(("data", "reason"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_message_closes_the_connection(data, reason):
    with raw_peer() as (connection, peer):
        peer.sendall(SMALL + data[:1000])
        assert connection.receive(timeout_s=LONG_S).payload.take() == "hello"
        error = soon(connection.receive, timeout_s=LONG_S)
        assert "the other end sent an invalid message" in error
        assert re.search(reason, error)
        assert peer.recv(1) == b""
        assert "invalid message" in soon(connection.send, 1, 1, None, timeout_s=LONG_S)


@pytest.mark.parametrize("frame", [SMALL, ARRAY], ids=["small", "array"])
@pytest.mark.parametrize("size", [1, HEADER_BYTES, -1])
def test_a_truncated_message_is_told_as_such(frame, size):
    with raw_peer() as (connection, peer):
        peer.sendall(frame[:size])
        peer.shutdown(socket.SHUT_WR)
        error = soon(connection.receive, timeout_s=LONG_S)
        assert "the other end closed the connection in the middle of a message" in error


def test_an_end_between_messages_is_told_as_such():
    with raw_peer() as (connection, peer):
        peer.sendall(SMALL)
        peer.close()
        assert connection.receive(timeout_s=LONG_S).payload.take() == "hello"
        error = soon(connection.receive, timeout_s=LONG_S)
        assert error == ("The connection is lost: the other end closed the connection.")


def test_a_lying_header_takes_no_memory():
    limits = MessageLimits(message_bytes=1 << 20)
    with raw_peer(limits=limits) as (connection, peer):
        frame = frame_with_buffers(
            1, 1, b"x", layout=lay_out([memoryview(bytes(2 << 20))])
        )[0]
        peer.sendall(frame)
        tracemalloc.start()
        try:
            assert "1048576" in soon(connection.receive, timeout_s=LONG_S)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_value_that_is_none_of_ours_harms_no_other_message():
    with raw_peer() as (connection, peer):
        peer.sendall(frame_without_buffers(1, 1, b"\x91") + SMALL)
        bad = connection.receive(timeout_s=LONG_S).payload
        assert connection.receive(timeout_s=LONG_S).payload.take() == "hello"
        with pytest.raises(ValueError, match="value"):
            bad.take()


# Time.


@pytest.mark.parametrize("frame", [SMALL, ARRAY], ids=["small", "array"])
def test_a_timeout_in_the_middle_of_a_message_loses_nothing(frame):
    with raw_peer() as (connection, peer):
        for start in range(0, len(frame), len(frame) // 4):
            with pytest.raises(CallTimeoutError, match="the other end sent no message"):
                connection.receive(timeout_s=0.005)
            peer.sendall(frame[start : start + len(frame) // 4])
        assert connection.receive(timeout_s=LONG_S).call_id == 5


def test_a_half_open_connection_ends_in_time():
    with raw_peer() as (connection, peer):
        peer.sendall(ARRAY[:-1])
        start = time.monotonic()
        with pytest.raises(CallTimeoutError):
            connection.receive(timeout_s=SHORT_S)
        assert SHORT_S <= time.monotonic() - start < LONG_S / 2


def test_a_peer_that_drips_does_not_stretch_the_deadline():
    with raw_peer() as (connection, peer):
        stop = threading.Event()

        def drip():
            for byte in ARRAY:
                peer.sendall(bytes([byte]))
                if stop.wait(0.01):
                    return

        with ThreadPoolExecutor(1) as pool:
            pool.submit(drip)
            start = time.monotonic()
            with pytest.raises(CallTimeoutError):
                connection.receive(timeout_s=SHORT_S)
            assert time.monotonic() - start < LONG_S / 2
            stop.set()


@pytest.mark.parametrize("timeout_s", [0.03, 0.2])
def test_waits_of_any_length_end_in_time(timeout_s):
    with raw_peer() as (connection, _):
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(CallTimeoutError):
                connection.receive(timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - start < LONG_S / 2


def test_a_wait_without_bound_after_a_bounded_one_has_none():
    with raw_peer() as (connection, peer):
        with pytest.raises(CallTimeoutError):
            connection.receive(timeout_s=0.01)
        with ThreadPoolExecutor(1) as pool:
            promise = pool.submit(connection.receive, timeout_s=None)
            with pytest.raises(TimeoutError):
                promise.result(SHORT_S)
            peer.sendall(SMALL)
            assert promise.result(LONG_S).call_id == 5


def fill(connection):
    while True:
        connection.send(1, 1, bytes(9_000), timeout_s=0)


def read_all(peer):
    peer.shutdown(socket.SHUT_WR)
    size = 0
    while data := peer.recv(1 << 20):
        size += len(data)
    return size


def test_a_message_that_finds_no_room_is_not_sent_at_all():
    with raw_peer() as (connection, peer):
        with pytest.raises(CallTimeoutError, match="does not read"):
            fill(connection)
        size = len(peer.recv(1 << 20))
        connection.send(1, 1, "next", timeout_s=LONG_S)
        connection.close()
        assert (size + read_all(peer) - len(frame_of("next"))) % len(
            frame_of(bytes(9_000))
        ) == 0


def test_a_half_sent_message_closes_the_connection():
    with raw_peer() as (connection, peer):
        start = time.monotonic()
        with pytest.raises(CallTimeoutError, match="the other end does not read"):
            connection.send(1, 1, bytes(50 << 20), timeout_s=SHORT_S)
        assert time.monotonic() - start < LONG_S / 2
        error = soon(connection.send, 1, 1, None, timeout_s=LONG_S)
        assert "half of a message" in error
        assert 0 < read_all(peer) < 50 << 20


def test_a_large_message_waits_for_a_slow_reader():
    value = np.arange(1 << 20)
    with raw_peer() as (connection, peer), ThreadPoolExecutor(1) as pool:
        promise = pool.submit(connection.send, 1, 5, value, timeout_s=LONG_S)
        received = b""
        while len(received) < len(frame_of(value)):
            received += peer.recv(30_000)
        promise.result(LONG_S)
        layout = lay_out(encode(value).buffers)
        parts = frame_with_buffers(1, 5, encode(value).head, layout=layout)
        assert received == b"".join(parts)


def test_who_waits_for_another_sender_ends_in_time():
    with raw_peer() as (connection, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(connection.send, 1, 1, bytes(50 << 20), timeout_s=LONG_S)
        wait_until(lambda: connection._send_lock.locked())
        with pytest.raises(CallTimeoutError, match="Others were sending"):
            connection.send(1, 2, None, timeout_s=SHORT_S)
        connection.close()
        with pytest.raises(ConnectionLostError):
            first.result(LONG_S)


def test_closing_wakes_who_sends():
    with raw_peer() as (connection, _), ThreadPoolExecutor(1) as pool:
        promise = pool.submit(connection.send, 1, 1, bytes(50 << 20), timeout_s=None)
        wait_until(lambda: connection._send_lock.locked())
        connection.close()
        with pytest.raises(ConnectionLostError, match="closed by this end"):
            promise.result(LONG_S)


def test_an_interrupt_in_the_middle_of_a_message_closes_the_connection():
    has_come = threading.Event()

    def interrupt(*_):
        if not has_come.is_set():
            has_come.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with raw_peer() as (connection, peer), ThreadPoolExecutor(1) as pool:

            def interrupt_what_has_begun():
                peer.recv(1, socket.MSG_PEEK)
                # One that comes just before a wait does not end it.
                while not has_come.wait(0.05):
                    os.kill(os.getpid(), signal.SIGALRM)

            pool.submit(interrupt_what_has_begun)
            with pytest.raises(KeyboardInterrupt):
                connection.send(1, 1, bytes(50 << 20), timeout_s=LONG_S)
            assert "half" in soon(connection.send, 1, 1, None, timeout_s=LONG_S)
    finally:
        has_come.set()
        signal.signal(signal.SIGALRM, before)


def test_who_does_not_read_takes_little_memory():
    with raw_peer() as (connection, _):
        sent = 0
        with contextlib.suppress(CallTimeoutError):
            for _ in range(10_000):
                sent += connection.send(1, 1, bytes(9_000), timeout_s=0)
        assert 0 < sent < 4 << 20


# Resources.


def test_the_descriptor_is_given_back_by_whoever_is_last():
    with raw_peer() as (connection, _), ThreadPoolExecutor(1) as pool:
        promise = pool.submit(connection.receive, timeout_s=LONG_S)
        wait_until(lambda: connection._is_receiving)
        assert connection.fileno() >= 0
        connection.close()
        with pytest.raises(ConnectionLostError):
            promise.result(LONG_S)
        wait_until(lambda: connection.fileno() == -1)


def test_many_connections_leave_nothing_open():
    gc.collect()  # what tests before have left, in circles through their frames
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(20):
        with raw_peer() as (connection, peer):
            peer.sendall(b"junk" * 20)
            soon(connection.receive, timeout_s=LONG_S)
    gc.collect()
    if before:
        # What other tests have left may close meanwhile.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_an_array_stays_as_it_came_while_others_come():
    with raw_peer() as (connection, peer), ThreadPoolExecutor(1) as pool:
        kept = []
        for number in range(10):
            frame = frame_of(np.full(200_000, number, np.uint8))
            sent = pool.submit(peer.sendall, frame)
            kept.append(connection.receive(timeout_s=LONG_S).payload.take())
            sent.result(LONG_S)
    assert [set(array) for array in kept] == [{number} for number in range(10)]
    assert all(array.ctypes.data % 64 == 0 for array in kept)


def test_no_source_decides_by_a_count_of_references():
    # Python 3.14 counts otherwise: what looks unused is not.
    sources = Path(replicator.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "getrefcount" in path.read_text()]


@pytest.mark.slow
def test_importing_loads_no_optional_package_and_starts_no_thread():
    code = f"""
import sys, threading
import {UnixConnection.__module__}, replicator.rpc.transports.connect
assert not {{"grpc", "cryptography"}} & set(sys.modules)
assert threading.active_count() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
