"""A queue is bounded, in order, and nobody waits in it for ever."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.rpc.transports.bounded_queue import BoundedQueue
from tests.rpc.transports.ends import LONG_S, SHORT_S


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_items_come_out_in_order():
    queue = BoundedQueue(3)
    for item in (1, 2, 3):
        queue.put(item, None)
    assert len(queue) == 3
    assert [queue.take(None) for _ in range(3)] == [1, 2, 3]


def test_who_takes_waits_for_an_item_and_gives_up_in_time(pool):
    queue = BoundedQueue(1)
    with pytest.raises(TimeoutError):
        queue.take(SHORT_S)
    taking = pool.submit(queue.take, LONG_S)
    queue.put("item", None)
    assert taking.result(LONG_S) == "item"


def test_a_full_queue_makes_wait_and_gives_up_in_time(pool):
    queue = BoundedQueue(10, size=len)
    queue.put(b"1234567", None)
    queue.put(b"123", None)
    with pytest.raises(TimeoutError):
        queue.put(b"1", SHORT_S)
    putting = pool.submit(queue.put, b"1234", LONG_S)
    queue.take(None)
    assert putting.result(LONG_S) is None
    assert [queue.take(0), queue.take(0)] == [b"123", b"1234"]


def test_what_is_larger_than_the_bound_is_held_alone():
    queue = BoundedQueue(2, size=len)
    queue.put(b"12345", 0)
    with pytest.raises(TimeoutError):
        queue.put(b"1", 0)
    assert queue.take(0) == b"12345"
    queue.put(b"1", 0)
    with pytest.raises(TimeoutError):
        queue.put(b"12345", 0)


def test_small_items_are_taken_if_they_are_there():
    queue = BoundedQueue(10, size=len)
    assert queue.take_small(4) is None
    queue.put(b"1234", None)
    queue.put(b"12345", None)
    assert queue.take_small(4) == b"1234"
    assert queue.take_small(4) is None
    assert queue.take(0) == b"12345"


def test_what_was_put_before_the_end_is_taken_after_it():
    queue = BoundedQueue(2)
    queue.put(1, None)
    queue.end()
    assert queue.has_ended
    with pytest.raises(EOFError):
        queue.put(2, None)
    assert queue.take(None) == 1
    for _ in range(2):
        with pytest.raises(EOFError):
            queue.take(None)


def test_the_end_wakes_all_who_wait(pool):
    empty, full = BoundedQueue(1), BoundedQueue(1)
    full.put(1, None)
    waiting = [
        *(pool.submit(empty.take, None) for _ in range(2)),
        *(pool.submit(full.put, number, None) for number in range(2)),
    ]
    empty.end()
    full.end(drop=True)
    for promise in waiting:
        with pytest.raises(EOFError):
            promise.result(LONG_S)
    assert not full


def test_who_waits_until_it_is_empty_is_woken(pool):
    queue, other = BoundedQueue(2), BoundedQueue(2)
    for each in (queue, other):
        each.put(1, None)
    waiting = [pool.submit(each.wait_empty) for each in (queue, other)]
    queue.take(0)
    other.end()
    for promise in waiting:
        assert promise.result(LONG_S) is None
