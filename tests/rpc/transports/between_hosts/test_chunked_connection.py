"""A connection reads its stream no further than it may, and loses nothing of it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from replicator.errors import (
    AuthenticationError,
    CallTimeoutError,
    ConnectionLostError,
)
from replicator.rpc.codec.codec import encode
from replicator.rpc.codec.registry import DEFAULT_REGISTRY
from replicator.rpc.security.authentication import ClientHandshake, ServerHandshake
from replicator.rpc.transports import frames
from replicator.rpc.transports.between_hosts.chunk_handshake import admit_client
from replicator.rpc.transports.between_hosts.chunk_queues import (
    CHUNK_BYTES,
    WAITING_BYTES,
    Outgoing,
)
from replicator.rpc.transports.between_hosts.chunked_connection import ChunkedConnection
from replicator.rpc.transports.payloads import Encoding
from tests.rpc.transports.ends import LIMITS, LONG_S, SECRET, SHORT_S, wait_until


class Stream:
    """A source of chunks that tells how far it was read, and ends when it may."""

    def __init__(self, *chunks):
        self.chunks = [*chunks]
        self.num_read = 0
        self.more = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        if self.num_read == len(self.chunks):
            assert self.more.wait(LONG_S)
            raise StopIteration
        self.num_read += 1
        return self.chunks[self.num_read - 1]


@pytest.fixture
def reading():
    """Return what starts to read a stream; end all of it after the test."""
    started = []

    def start(*chunks):
        stream = Stream(*chunks)
        connection = connection_of(stream, cut_off=stream.more.set)
        started.append((connection, stream))
        return connection, stream

    yield start
    for connection, stream in started:
        stream.more.set()
        connection.close()


def connection_of(stream, cut_off=lambda: None):
    outgoing = Outgoing()
    threading.Thread(target=lambda: [*iter(outgoing.take, None)], daemon=True).start()
    return ChunkedConnection(
        "the other end",
        stream=iter(stream),
        outgoing=outgoing,
        encoding=Encoding(DEFAULT_REGISTRY, LIMITS),
        cut_off=cut_off,
    )


def frame_of(num_bytes, call_id=1):
    head, buffers, _ = encode(np.zeros(num_bytes, np.uint8))
    if not buffers:
        return frames.frame_without_buffers(1, call_id, head)
    layout = frames.lay_out(buffers)
    return b"".join(frames.frame_with_buffers(1, call_id, head, layout=layout))


def in_chunks(whole, size):
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def received(connection, timeout_s=LONG_S):
    message = connection.receive(timeout_s=timeout_s)
    return message.call_id, message.payload.take().nbytes


def test_a_stranger_is_read_no_further_than_its_next_step():
    ours = ClientHandshake(SECRET)
    stream, outgoing = Stream(ours.hello(), bytes(40), b"more", b"and more"), Outgoing()
    with pytest.raises(AuthenticationError, match="did not prove"):
        admit_client(
            ServerHandshake(SECRET), stream, outgoing, peer="a client", deadline=1e18
        )
    assert stream.num_read == 2


def test_messages_are_cut_wherever_chunks_end(reading):
    sizes = (5, 100_000, 0, 40_000, 7)
    whole = b"".join(frame_of(size, size) for size in sizes)
    for size in (1_000, 41_111, len(whole)):
        connection, _ = reading(*in_chunks(whole, size))
        assert [received(connection) for _ in sizes] == [(n, n) for n in sizes]


def test_small_messages_are_not_read_past_the_bound(reading):
    each = 1_000_000
    connection, stream = reading(*[frame_of(each)] * 20)
    most = -(-WAITING_BYTES // each)
    # As many as there is room for, and one that waits for room.
    wait_until(lambda: (stream.num_read, len(connection._incoming)) == (most, most - 1))
    for _ in range(20):
        received(connection)


def test_a_large_message_is_read_when_those_before_were_received(reading):
    cuts = in_chunks(frame_of(3 * WAITING_BYTES), CHUNK_BYTES)
    connection, stream = reading(frame_of(10), *cuts)
    wait_until(lambda: stream.num_read == 2 and connection.has_received())
    assert stream.num_read == 2
    assert received(connection) == (1, 10)
    assert received(connection) == (1, 3 * WAITING_BYTES)


def test_what_arrived_before_the_end_is_received_before_it(reading):
    connection, stream = reading(frame_of(10), frame_of(20))
    stream.more.set()
    assert connection._has_ended.wait(LONG_S)
    assert [received(connection, 0) for _ in range(2)] == [(1, 10), (1, 20)]
    for _ in range(2):
        with pytest.raises(ConnectionLostError, match="it closed the connection"):
            received(connection, 0)


def test_nothing_can_be_sent_when_the_stream_has_ended(reading):
    connection, stream = reading()
    stream.more.set()
    assert connection._has_ended.wait(LONG_S)
    with pytest.raises(ConnectionLostError):
        connection.send(1, 1, "word", timeout_s=LONG_S)


def test_why_a_stream_ended_is_told():
    def stream():
        yield frame_of(10)
        raise ConnectionError("the wire is cut")

    connection = connection_of(stream())
    assert received(connection) == (1, 10)
    with pytest.raises(ConnectionLostError, match="the wire is cut"):
        received(connection)
    assert connection._failure.__traceback__ is None
    connection.close()


def test_what_is_no_message_ends_it(reading):
    connection, _ = reading(b"RPLX" + bytes(100))
    with pytest.raises(ConnectionLostError, match="no message, and was cut off"):
        received(connection)


def test_who_receives_gives_up_in_time(reading):
    connection, _ = reading(frame_of(10)[:20])
    with pytest.raises(CallTimeoutError):
        received(connection, SHORT_S)
    assert not connection.has_received()


def test_closing_wakes_who_receives(reading):
    connection, _ = reading()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(received, connection)
        pool.submit(connection.close)
        with pytest.raises(ConnectionLostError, match="closed by this end"):
            waiting.result(LONG_S)


def test_what_is_not_wanted_any_more_is_read_to_its_end(reading):
    connection, stream = reading(*[frame_of(WAITING_BYTES)] * 3)
    wait_until(connection.has_received)
    stream.more.set()
    connection.close()
    assert connection._has_ended.wait(LONG_S)
    assert stream.num_read == 3
    assert not connection.has_received()
