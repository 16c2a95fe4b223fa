"""The queues beside a stream: bounded, in order, and nobody waits in them for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.rpc.transports import frames
from replicator.rpc.transports.between_hosts.chunk_queues import (
    CHUNK_BYTES,
    WAITING_BYTES,
    ClosedError,
    Incoming,
    Outgoing,
)
from tests.rpc.transports.ends import LIMITS, LONG_S, SHORT_S, wait_until


def soon():
    return time.monotonic() + SHORT_S


def late():
    return time.monotonic() + LONG_S


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def outgoing():
    return Outgoing()


def take_all(outgoing):
    return list(iter(outgoing.take, None))


# Out.


def test_small_messages_that_wait_leave_together(outgoing):
    for word in (b"a", b"bc", b"d"):
        outgoing.put(word, deadline=None)
    assert outgoing.take() == b"abcd"


def test_no_chunk_is_larger_than_may_be(outgoing):
    for _ in range(3):
        outgoing.put(bytes(CHUNK_BYTES - 10), deadline=None)
        outgoing.put(bytes(10), deadline=None)
    outgoing.finish()
    assert [len(chunk) for chunk in take_all(outgoing)] == [CHUNK_BYTES] * 3


def test_a_large_message_keeps_its_place_and_leaves_in_its_own_chunks(outgoing, pool):
    outgoing.put(b"before", deadline=None)
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=late())
    wait_until(lambda: outgoing._waiting.qsize() == 2)
    outgoing.put(b"after", deadline=None)
    assert [outgoing.take() for _ in range(4)] == [b"before", b"1", b"2", b"after"]
    assert large.result(LONG_S) is None


def test_large_messages_of_many_threads_do_not_mix(outgoing, pool):
    for name in (b"a", b"b", b"c"):
        pool.submit(outgoing.put_large, iter([name] * 5), deadline=late())
    left = b"".join(outgoing.take() for _ in range(15))
    assert sorted(left[start : start + 5] for start in (0, 5, 10)) == [
        b"aaaaa",
        b"bbbbb",
        b"ccccc",
    ]
    outgoing.finish()
    assert outgoing.take() is None


def test_a_full_queue_makes_wait_and_gives_up_in_time(outgoing, pool):
    for _ in range(WAITING_BYTES // 1_000_000):
        outgoing.put(bytes(1_000_000), deadline=soon())
    with pytest.raises(TimeoutError):
        outgoing.put(bytes(1_000_000), deadline=soon())
    waiting = pool.submit(outgoing.put, bytes(1_000_000), deadline=late())
    outgoing.take()
    assert waiting.result(LONG_S) is None


def test_a_large_message_that_did_not_begin_is_withdrawn(outgoing):
    with pytest.raises(TimeoutError):
        outgoing.put_large(iter([b"large"]), deadline=soon())
    outgoing.put(b"next", deadline=None)
    assert outgoing.is_open
    assert outgoing.take() == b"next"


def test_a_large_message_that_has_begun_and_stops_closes_the_queue(outgoing, pool):
    taking = pool.submit(outgoing.take)
    # Where nobody takes the first part in time it is withdrawn.
    deadline = time.monotonic() + 1.0
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=deadline)
    assert taking.result(LONG_S) == b"1"
    with pytest.raises(TimeoutError):
        large.result(LONG_S)
    assert not outgoing.is_open
    assert outgoing.take() is None


def test_what_waits_when_it_is_finished_still_leaves(outgoing):
    outgoing.put(b"last", deadline=None)
    outgoing.finish()
    with pytest.raises(ClosedError):
        outgoing.put(b"more", deadline=None)
    assert not outgoing.wait_drained(0)
    assert take_all(outgoing) == [b"last"]
    assert outgoing.wait_drained(0)


def test_abandoning_drops_what_waits_and_wakes_all_who_wait(outgoing, pool):
    taking = pool.submit(Outgoing.take, other := Outgoing())
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=None)
    assert outgoing.take() == b"1"
    outgoing.put(bytes(WAITING_BYTES), deadline=None)
    small = pool.submit(outgoing.put, b"small", deadline=None)
    wait_until(lambda: outgoing._are_waiting == 1)
    outgoing.abandon()
    other.abandon()
    for promise in (large, small):
        with pytest.raises(ClosedError):
            promise.result(LONG_S)
    assert taking.result(LONG_S) is outgoing.take() is None


# In.


class Stream:
    """An endless source of chunks that tells how far it was read."""

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
def reading(pool):
    """Return what starts to read a stream; end all of it after the test."""
    started = []

    def start(*chunks):
        incoming, stream = Incoming(), Stream(*chunks)
        started.append((incoming, stream))
        pool.submit(incoming.fill_from, stream)
        return incoming, stream

    yield start
    for incoming, stream in started:
        stream.more.set()
        incoming.stop()


def reader():
    return frames.FrameReader(
        LIMITS,
        allocate=lambda num_bytes: memoryview(bytearray(num_bytes)),
        open_shared=lambda where, num_bytes: memoryview(b""),
    )


def frame_of(num_bytes, call_id=1):
    if not num_bytes:
        return frames.frame_without_buffers(1, call_id, b"h")
    layout = frames.lay_out([memoryview(bytes(num_bytes))])
    return b"".join(frames.frame_with_buffers(1, call_id, b"h", layout=layout))


def test_a_stranger_is_read_no_further_than_its_next_step(reading):
    incoming, stream = reading(b"hello", b"answer", b"more", b"and more")
    assert incoming.next_chunk(late()) == b"hello"
    assert incoming.next_chunk(late()) == b"answer"
    with pytest.raises(TimeoutError):
        incoming.next_frame(SHORT_S)
    assert stream.num_read == 2


def test_messages_are_cut_wherever_chunks_end(reading):
    whole = b"".join(frame_of(size, size) for size in (5, 100_000, 0, 40_000, 7))
    for size in (1_000, 41_111, len(whole)):
        chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
        incoming, _ = reading(*chunks)
        incoming.start(reader())
        got = [incoming.next_frame(LONG_S) for _ in range(5)]
        assert [frame.call_id for frame in got] == [5, 100_000, 0, 40_000, 7]
        assert [len(frame.body) for frame in got] == [5, 100_000, 0, 40_000, 7]


def test_small_messages_are_not_read_past_the_bound(reading):
    each = 1_000_000
    incoming, stream = reading(*[frame_of(each)] * 20)
    incoming.start(reader())
    wait_until(lambda: stream.num_read and incoming._is_waiting)
    assert stream.num_read == -(-WAITING_BYTES // each)
    for _ in range(20):
        incoming.next_frame(LONG_S)


def test_a_large_message_is_read_when_those_before_were_received(reading):
    large = frame_of(3 * WAITING_BYTES)
    cuts = [large[at : at + CHUNK_BYTES] for at in range(0, len(large), CHUNK_BYTES)]
    incoming, stream = reading(frame_of(10), *cuts)
    incoming.start(reader())
    wait_until(lambda: stream.num_read and incoming._is_waiting)
    assert stream.num_read == 2
    assert len(incoming.next_frame(LONG_S).body) == 10
    assert len(incoming.next_frame(LONG_S).body) == 3 * WAITING_BYTES


def test_what_arrived_before_the_end_is_received_before_it(reading):
    incoming, stream = reading(frame_of(10), frame_of(20))
    stream.more.set()
    incoming.start(reader())
    assert incoming.wait_ended(LONG_S)
    assert [len(incoming.next_frame(0).body) for _ in range(2)] == [10, 20]
    for _ in range(2):
        with pytest.raises(ClosedError):
            incoming.next_frame(0)


def test_why_a_stream_ended_is_kept(pool):
    def stream():
        yield frame_of(10)
        raise ConnectionError("the wire is cut")

    incoming = Incoming()
    incoming.start(reader())
    assert incoming.fill_from(stream())
    assert incoming.next_frame(0).call_id == 1
    assert "the wire is cut" in str(incoming.failure)
    assert incoming.failure.__traceback__ is None


def test_stopping_wakes_who_waits_for_chunks_and_for_messages(pool):
    incoming = Incoming()
    waiting = [
        pool.submit(incoming.next_chunk, late()),
        pool.submit(incoming.next_frame, LONG_S),
    ]
    incoming.stop()
    for promise in waiting:
        with pytest.raises(ClosedError):
            promise.result(LONG_S)


def test_a_stream_that_was_stopped_has_not_ended():
    """So what is to leave on it still does."""
    incoming = Incoming()
    incoming.stop()
    assert not incoming.fill_from(iter([b"chunk"]))


def test_what_is_discarded_is_read_to_its_end_and_kept_nowhere(reading, pool):
    incoming, stream = reading(*[frame_of(WAITING_BYTES)] * 3)
    incoming.start(reader())
    wait_until(lambda: stream.num_read and incoming._is_waiting)
    incoming.discard()
    stream.more.set()
    assert incoming.wait_ended(LONG_S)
    assert stream.num_read == 3
    incoming.next_frame(0)
    with pytest.raises(ClosedError):
        incoming.next_frame(0)
