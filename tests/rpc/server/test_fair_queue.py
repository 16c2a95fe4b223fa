import pytest

from replicator.rpc.server.fair_queue import FairQueue


def taken(waiting, count):
    calls = []
    for _ in range(count):
        source, call = waiting.take()
        waiting.done(source)
        calls.append(call)
    return calls


def queue_of(calls, max_seats=16):
    waiting = FairQueue(max_seats=max_seats)
    for call in calls:
        waiting.put(call[0], call)
    return waiting


def test_calls_of_one_client_come_in_their_order():
    assert taken(queue_of(["a1", "a2", "a3"]), 3) == ["a1", "a2", "a3"]


def test_clients_take_turns():
    waiting = queue_of(["a1", "a2", "a3", "a4", "b1", "b2", "c1"])
    assert taken(waiting, 7) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


def test_nothing_is_taken_from_an_empty_queue():
    assert FairQueue(max_seats=1).take() is None


def test_a_client_with_all_its_seats_taken_waits_and_others_do_not():
    waiting = queue_of(["a1", "a2", "a3", "b1"], max_seats=2)
    assert [waiting.take()[1] for _ in range(3)] == ["a1", "b1", "a2"]
    assert waiting.take() is None
    waiting.done("a")
    assert waiting.take() == ("a", "a3")


def test_a_call_put_while_its_client_has_no_seat_waits_for_one():
    waiting = queue_of(["a1"], max_seats=1)
    waiting.take()
    waiting.put("a", "a2")
    assert waiting.take() is None
    waiting.done("a")
    assert waiting.take() == ("a", "a2")


@pytest.mark.parametrize("seated", [0, 1])
def test_a_dropped_client_leaves_nothing(seated):
    waiting = queue_of(["a1", "a2", "a3", "b1"], max_seats=1)
    for _ in range(seated):
        waiting.take()
    assert waiting.drop("a") == ["a1", "a2", "a3"][seated:]
    assert waiting.take() == ("b", "b1")
    assert waiting.take() is None
    assert list(waiting) == []


def test_a_client_that_is_not_there_can_be_dropped():
    assert FairQueue(max_seats=1).drop("a") == []


def test_iteration_tells_what_waits():
    waiting = queue_of(["a1", "a2", "b1"])
    waiting.take()
    assert sorted(waiting) == ["a2", "b1"]
