import pytest

from replicator.rpc.server.fair_queue import FairQueue


def taken(waiting, count):
    calls = []
    for _ in range(count):
        source, call = waiting.take(16)
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
    assert FairQueue(max_seats=1).take(1) is None


def test_a_client_with_all_its_seats_taken_waits_and_others_do_not():
    waiting = queue_of(["a1", "a2", "a3", "b1"], max_seats=2)
    assert [waiting.take(16)[1] for _ in range(3)] == ["a1", "b1", "a2"]
    assert waiting.take(16) is None
    waiting.done("a")
    assert waiting.take(16) == ("a", "a3")


def test_a_call_put_while_its_client_has_no_seat_waits_for_one():
    waiting = queue_of(["a1"], max_seats=1)
    waiting.take(16)
    waiting.put("a", "a2")
    assert waiting.take(16) is None
    waiting.done("a")
    assert waiting.take(16) == ("a", "a2")


@pytest.mark.parametrize("seated", [0, 1])
def test_a_dropped_client_leaves_nothing(seated):
    waiting = queue_of(["a1", "a2", "a3", "b1"], max_seats=1)
    for _ in range(seated):
        waiting.take(16)
    assert waiting.drop("a") == ["a1", "a2", "a3"][seated:]
    assert waiting.take(16) == ("b", "b1")
    assert waiting.take(16) is None
    assert list(waiting) == []


def test_a_client_that_is_not_there_can_be_dropped():
    assert FairQueue(max_seats=1).drop("a") == []


def test_iteration_tells_what_waits():
    waiting = queue_of(["a1", "a2", "b1"])
    waiting.take(16)
    assert sorted(waiting) == ["a2", "b1"]


def seated(waiting, size):
    """Take as long as there is a seat and who may have it; return whose they are."""
    sources = []
    while len(sources) < size and (taken := waiting.take(size - len(sources))):
        sources.append(taken[0])
    return "".join(sources)


def test_the_last_seats_are_for_clients_that_have_next_to_none():
    waiting = FairQueue(max_seats=16, reserved=4)
    for call in range(20):
        waiting.put("a", f"a{call}")
    assert seated(waiting, 16) == "a" * 12
    waiting.put("b", "b0")
    assert waiting.take(4) == ("b", "b0")


def test_many_greedy_clients_leave_seats_too():
    waiting = FairQueue(max_seats=64, reserved=16)
    for call in range(64):
        for source in "abcde":
            waiting.put(source, f"{source}{call}")
    assert len(seated(waiting, 64)) == 48
    waiting.put("f", "f0")
    assert waiting.take(16) == ("f", "f0")
