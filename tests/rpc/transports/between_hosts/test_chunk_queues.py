"""What leaves on a stream: bounded, in order, and nobody waits there for ever."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.rpc.transports.between_hosts.chunk_queues import (
    CHUNK_BYTES,
    WAITING_BYTES,
    Outgoing,
)
from tests.rpc.transports.ends import LONG_S, SHORT_S, wait_until


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
    wait_until(lambda: len(outgoing._waiting) == 2)
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


def test_a_large_message_that_finds_no_room_is_withdrawn(outgoing):
    outgoing.put(bytes(WAITING_BYTES), deadline=None)
    with pytest.raises(TimeoutError):
        outgoing.put_large(iter([b"large"]), deadline=soon())
    assert outgoing.is_open
    outgoing.finish()
    assert take_all(outgoing) == [bytes(WAITING_BYTES)]


def test_a_large_message_that_has_begun_and_stops_closes_the_queue(outgoing, pool):
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=soon())
    assert outgoing.take() == b"1"
    with pytest.raises(TimeoutError):
        large.result(LONG_S)
    assert not outgoing.is_open
    assert outgoing.take() is None


def test_what_waits_when_it_is_finished_still_leaves(outgoing):
    outgoing.put(b"last", deadline=None)
    outgoing.finish()
    with pytest.raises(EOFError):
        outgoing.put(b"more", deadline=None)
    assert not outgoing.wait_drained(0)
    assert take_all(outgoing) == [b"last"]
    assert outgoing.wait_drained(0)


def test_a_large_message_that_waits_when_it_is_finished_leaves_whole(outgoing, pool):
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=late())
    assert outgoing.take() == b"1"
    outgoing.finish()
    assert take_all(outgoing) == [b"2"]
    assert large.result(LONG_S) is None


def test_abandoning_drops_what_waits_and_wakes_all_who_wait(outgoing, pool):
    taking = pool.submit(Outgoing.take, other := Outgoing())
    large = pool.submit(outgoing.put_large, iter([b"1", b"2"]), deadline=None)
    assert outgoing.take() == b"1"
    second = pool.submit(outgoing.put_large, iter([b"3"]), deadline=None)
    wait_until(lambda: len(outgoing._waiting) == 1)
    outgoing.put(bytes(WAITING_BYTES - CHUNK_BYTES), deadline=None)
    small = pool.submit(outgoing.put, b"small", deadline=None)
    outgoing.abandon()
    other.abandon()
    for promise in (large, second, small):
        with pytest.raises(EOFError):
            promise.result(LONG_S)
    assert taking.result(LONG_S) is outgoing.take() is None
