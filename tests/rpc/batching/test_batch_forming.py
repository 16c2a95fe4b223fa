import random

import pytest

from replicator.rpc.batching.batch_forming import BatchQueue, BatchRules
from tests.fakes import FakeClock


class Table:
    """A state, its rules and a clock; remembers which batches ran."""

    def __init__(self, batch_size=2, max_parallelism=1, timeout_s=1.0):
        rules = BatchRules(
            batch_size=batch_size,
            max_parallelism=max_parallelism,
            timeout_s=timeout_s,
        )
        self.state = BatchQueue(rules)
        self.clock = FakeClock()
        self.ran = []
        self.watches = []

    def act(self, watched=None):
        if watched is not None:
            self.watches.append((watched.calls[0], watched.due_s))
        started = self.state.start(self.clock.now_s())
        self.ran += [tuple(batch.calls) for batch in started]

    def arrive(self, *calls, fit="fit"):
        for call in calls:
            self.act(self.state.join(call, fit, self.clock.now_s()))

    def wait(self, seconds):
        self.clock.advance(seconds)
        self.act()

    def finish(self):
        self.state.running -= 1
        self.act()

    def leave(self, call):
        self.act(self.state.leave(call))

    def is_empty(self):
        return (self.state.waiting, self.state.running) == ([], 0)


def test_full_batch_runs_at_once():
    table = Table()
    table.arrive(1)
    assert table.ran == []
    table.arrive(2)
    assert table.ran == [(1, 2)]


def test_time_counts_from_the_first_call_of_a_batch():
    table = Table(batch_size=3)
    table.arrive(1)
    table.wait(0.9)
    table.arrive(2)
    table.wait(0.1)
    assert table.ran == [(1, 2)]
    assert table.watches == [(1, 1.0)]


def test_batch_whose_time_is_over_fills_while_others_run():
    table = Table(batch_size=3)
    table.arrive(1, 2, 3, 4)
    table.wait(5)
    assert table.ran == [(1, 2, 3)]
    table.arrive(5)
    table.finish()
    assert table.ran == [(1, 2, 3), (4, 5)]


def test_full_batches_wait_for_their_turn_in_order():
    table = Table()
    table.arrive(*range(8))
    assert table.ran == [(0, 1)]
    table.finish()
    table.finish()
    assert table.ran == [(0, 1), (2, 3), (4, 5)]


def test_as_many_run_as_may_run():
    table = Table(max_parallelism=2)
    table.arrive(*range(6))
    assert table.ran == [(0, 1), (2, 3)]


def test_calls_that_do_not_fit_form_batches_of_their_own():
    table = Table(max_parallelism=2)
    table.arrive(1, fit="a")
    table.arrive(2, fit="b")
    assert table.ran == []
    table.arrive(3, fit="b")
    table.wait(1)
    assert table.ran == [(2, 3), (1,)]


def test_without_time_to_wait_calls_meet_only_behind_others():
    table = Table(batch_size=3, timeout_s=0)
    table.arrive(1, 2, 3)
    assert table.ran == [(1,)]
    table.finish()
    assert table.ran == [(1,), (2, 3)]


def test_who_leaves_does_not_run_and_another_watches():
    table = Table(batch_size=3)
    table.arrive(1, 2)
    table.leave(1)
    assert table.watches == [(1, 1.0), (2, 1.0)]
    table.wait(1)
    assert table.ran == [(2,)]


def test_the_last_who_leaves_leaves_nothing():
    table = Table()
    table.arrive(1)
    table.leave(1)
    assert table.is_empty()


def test_who_leaves_while_running_changes_nothing():
    table = Table()
    table.arrive(1, 2)
    table.leave(1)
    table.finish()
    assert table.ran == [(1, 2)]
    assert table.is_empty()


def random_event(rng, table, calls):
    waiting = [call for batch in table.state.waiting for call in batch.calls]
    match rng.choice(["arrive", "arrive", "arrive", "wait", "finish", "leave"]):
        case "arrive":
            calls[len(calls)] = rng.choice("ab")
            table.arrive(len(calls) - 1, fit=calls[len(calls) - 1])
        case "wait":
            table.wait(rng.random())
        case "finish" if table.state.running:
            table.finish()
        case "leave" if waiting:
            calls.pop(left := rng.choice(waiting))
            calls[left] = "left"
            table.leave(left)


@pytest.mark.parametrize("seed", range(20))
def test_any_story_keeps_the_promises(seed):
    rng = random.Random(seed)
    rules = rng.randint(1, 4), rng.randint(1, 3), rng.choice([0.0, 0.5, 2.0])
    table, calls = Table(*rules), {}
    for _ in range(300):
        random_event(rng, table, calls)
        running, waiting = table.state.running, table.state.waiting
        assert running <= rules[1]
        now_s = table.clock.now_s()
        may_run = [b for b in waiting if len(b.calls) == rules[0] or b.due_s <= now_s]
        assert not may_run or running == rules[1]
        watched = {call for call, _ in table.watches}
        assert all(batch.calls[0] in watched for batch in waiting)
    ran = [call for batch in table.ran for call in batch]
    waits = [call for batch in table.state.waiting for call in batch.calls]
    left = [call for call, fit in calls.items() if fit == "left"]
    assert sorted(ran + waits + left) == list(range(len(calls)))
    assert all(len({calls[call] for call in batch}) == 1 for batch in table.ran)
