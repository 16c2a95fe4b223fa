"""What the supervisor of a program decides, event by event: no worker, no clock."""

import itertools
import random

import pytest

from replicator.errors import ConnectionLostError, NodeFailedError, RemoteError
from replicator.launchpad_bridge.protocols import Exited, Restart, StopAsked
from replicator.launchpad_bridge.supervision.states import (
    Finish,
    GracePeriods,
    Kill,
    Say,
    Start,
    Stop,
    TimeUp,
)
from replicator.launchpad_bridge.supervision.supervisor import (
    begin,
    decide,
    describe,
    next_deadline_s,
)

PATIENCE = GracePeriods(stop_grace_s=10, kill_grace_s=5)
BUG = ValueError("a bug")
SIGNAL = StopAsked(by="signal")


def play(workers, *events):
    """Return the last state, and what was done for each event, words apart.

    Args:
      workers: Names, or their restarts by name.
      events: Each at its second, or (second, event).
    """
    restarts = (
        workers if isinstance(workers, dict) else dict.fromkeys(workers, Restart())
    )
    state, actions = begin(restarts, 0.0, patience=PATIENCE)
    assert actions == [Start(name=name, attempt=0) for name in restarts]
    done = []
    for second, event in enumerate(events):
        now_s, event = event if isinstance(event, tuple) else (second, event)
        state, actions = decide(state, event, float(now_s))
        done.append([action for action in actions if not isinstance(action, Say)])
    return state, done


def words(state, event, now_s=0.0):
    _, actions = decide(state, event, now_s)
    return [action.message for action in actions if isinstance(action, Say)]


def ended(name, outcome="returned", attempt=0, error=None):
    return Exited(name=name, attempt=attempt, outcome=outcome, error=error)


def raised(name, error=BUG, attempt=0):
    return ended(name, "raised", attempt, error)


def stopped(name):
    return ended(name, "stopped")


def died(name, attempt=0):
    return ended(name, "died", attempt, NodeFailedError(f"`{name}` died", node=name))


def test_a_program_without_workers_is_over_at_once():
    _, actions = begin({}, 0.0)
    assert actions == [Finish()]


def test_a_program_ends_well_when_all_workers_have_returned():
    state, done = play("ab", ended("a"), ended("b"))
    assert done == [[], [Finish()]]
    assert state.phase == "ended"


def test_one_failure_stops_the_others_at_once():
    state, done = play("abc", raised("b"))
    assert done == [[Stop(name="a"), Stop(name="c")]]
    assert (state.phase, state.failure) == ("stopping", raised("b"))


def test_a_death_is_a_failure_like_any_other():
    _, done = play("ab", died("a"), stopped("b"))
    assert [type(action) for action in done[1]] == [Finish]
    assert done[1][0].failure.name == "a"


def test_the_failure_of_the_last_worker_ends_the_run():
    _, done = play("ab", ended("a"), raised("b"))
    assert done[1] == [Finish(failure=raised("b"))]


def test_the_first_failure_is_named_whatever_follows():
    _, done = play("abc", raised("b"), died("a"), stopped("c"))
    assert done[-1] == [Finish(failure=raised("b"))]


def test_who_does_not_stop_is_killed_after_the_grace():
    state, done = play("abc", raised("b"), ended("a"), (9.9, TimeUp()), (10, TimeUp()))
    assert done[1:] == [[], [], [Kill(name="c")]]
    assert (state.phase, state.killed) == ("killing", {"c"})


def test_a_worker_that_was_killed_is_no_failure_of_a_clean_stop():
    _, done = play("a", StopAsked(by="a"), (10, TimeUp()), (11, died("a")))
    assert done == [[Stop(name="a")], [Kill(name="a")], [Finish(stopped_by="a")]]


def test_who_cannot_be_killed_is_left_behind_by_name():
    _, done = play("ab", raised("a"), (10, TimeUp()), (15, TimeUp()))
    assert done[-1] == [Finish(failure=raised("a"), left=("b",))]


def test_a_worker_may_ask_for_the_stop_of_all():
    _, done = play("ab", StopAsked(by="b"), stopped("a"), stopped("b"))
    assert done[0] == [Stop(name="a"), Stop(name="b")]
    assert done[-1] == [Finish(stopped_by="b")]


def test_asking_again_changes_nothing():
    state, done = play("ab", StopAsked(by="b"), (5, StopAsked(by="launcher")))
    assert done[1] == []
    assert (state.stopped_by, state.deadline_s) == ("b", 10)


def test_a_second_signal_kills_at_once():
    _, done = play("ab", SIGNAL, stopped("b"), SIGNAL, died("a"))
    assert done[2:] == [[Kill(name="a")], [Finish(stopped_by="signal")]]


def test_a_third_signal_does_nothing_more():
    _, done = play("a", SIGNAL, SIGNAL, SIGNAL)
    assert done[2] == []


def test_the_first_signal_of_a_run_that_stops_anyway_only_warns():
    state, done = play("ab", raised("a"), SIGNAL)
    assert done[1] == []
    assert words(state, SIGNAL) == ["killing all workers"]


def test_a_failure_while_stopping_fails_the_run():
    _, done = play("ab", StopAsked(by="a"), raised("b"), stopped("a"))
    assert done[-1] == [Finish(failure=raised("b"), stopped_by="a")]


GONE = [
    ConnectionLostError("gone"),
    RemoteError("gone", type_name="ServerStoppedError"),
    NodeFailedError("`b` raised"),
]
GONE[2].__cause__ = ConnectionLostError("gone")


@pytest.mark.parametrize("error", GONE, ids=["own", "remote", "wrapped"])
def test_that_a_peer_is_gone_is_no_failure_of_a_run_that_stops(error):
    _, done = play("ab", StopAsked(by="a"), raised("b", error), stopped("a"))
    assert done[-1] == [Finish(stopped_by="a")]


@pytest.mark.parametrize("error", GONE, ids=["own", "remote", "wrapped"])
def test_the_cause_is_blamed_not_the_symptom_that_was_noticed_before(error):
    _, done = play("abc", raised("b", error), died("a"), stopped("c"))
    assert done[-1][0].failure.name == "a"


def test_a_symptom_without_a_cause_is_the_failure():
    _, done = play("ab", raised("b", GONE[0]), stopped("a"))
    assert done[-1] == [Finish(failure=raised("b", GONE[0]))]


ONE = Restart(attempts=1, progress_s=60, backoff_s=0.5)
THREE = Restart(attempts=3, progress_s=60, backoff_s=0.5)


def test_a_failed_worker_is_started_again_after_a_while_where_that_is_wanted():
    state, done = play({"a": ONE, "b": Restart()}, died("a"), (0.5, TimeUp()))
    assert done == [[], [Start(name="a", attempt=1)]]
    assert state.phase == "running"


def test_it_is_not_started_before_its_time():
    state, done = play({"a": ONE}, died("a"), (0.4, TimeUp()))
    assert done[1] == []
    assert next_deadline_s(state) == 0.5


def crash_loop(restart, *, runs_s=0.0, times=20):
    """Let worker `a` fail again and again; return when it was started, and the end."""
    state, _ = begin({"a": restart, "b": Restart()}, 0.0, patience=PATIENCE)
    now_s, starts = 0.0, []
    for attempt in range(times):
        state, actions = decide(state, raised("a", attempt=attempt), now_s + runs_s)
        now_s = next_deadline_s(state)
        if state.phase != "running":
            break
        state, [start] = decide(state, TimeUp(), now_s)
        starts.append(now_s)
        assert start == Start(name="a", attempt=attempt + 1)
    return starts, state, actions


def test_a_crash_loop_has_as_many_restarts_as_allowed_ever_further_apart():
    starts, state, actions = crash_loop(THREE)
    assert starts == [0.5, 1.5, 3.5]
    assert state.phase == "stopping"
    assert Stop(name="b") in actions


def test_the_first_failure_of_a_crash_loop_is_the_one_that_is_told():
    _, state, _ = crash_loop(THREE)
    assert state.failure.attempt == 0


def test_the_wait_before_a_restart_has_a_bound():
    starts, _, _ = crash_loop(Restart(attempts=12, backoff_s=0.5))
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert max(waits) == waits[-1] == 30


def test_who_ran_long_enough_has_all_restarts_again():
    starts, state, _ = crash_loop(ONE, runs_s=60.0, times=10)
    assert len(starts) == 10
    assert state.phase == "running"


def test_progress_forgets_the_failures_before_it():
    state, _ = play(
        {"a": ONE},
        died("a"),
        (0.5, TimeUp()),
        (61, died("a", attempt=1)),
        (61.5, TimeUp()),
        (62, died("a", attempt=2)),
    )
    assert state.failure.attempt == 1


def test_who_waits_for_a_restart_does_not_come_back_once_the_run_stops():
    _, done = play({"a": ONE, "b": Restart()}, died("a"), raised("b"), (9, TimeUp()))
    assert done == [[], [Finish(failure=raised("b"))], []]


def test_a_run_whose_workers_all_wait_stops_at_once_when_asked():
    _, done = play({"a": ONE}, died("a"), SIGNAL)
    assert done[1] == [Finish(stopped_by="signal")]


def test_a_run_is_not_over_while_a_worker_waits_for_its_restart():
    state, done = play({"a": ONE, "b": Restart()}, died("a"), ended("b"))
    assert done == [[], []]
    assert state.phase == "running"


def test_a_worker_that_returned_is_not_started_again():
    _, done = play({"a": THREE}, ended("a"))
    assert done == [[Finish()]]


@pytest.mark.parametrize("event", [ended("a", attempt=1), ended("x"), TimeUp()])
def test_what_is_not_expected_changes_nothing(event):
    before, _ = play("ab")
    assert decide(before, event, 1.0) == (before, [])


@pytest.mark.parametrize("event", [ended("a"), SIGNAL, TimeUp(), raised("a")])
def test_nothing_happens_after_the_end(event):
    over, _ = play("a", ended("a"))
    assert decide(over, event, 99.0) == (over, [])


def test_restarts_are_said_with_their_number_and_reason():
    state, _ = begin({"a": THREE}, 0.0)
    assert words(state, raised("a")) == [
        "`a` raised ValueError: a bug; starting it again in 0.5 s (restart 1 of 3 "
        "without progress)"
    ]


def test_a_failure_is_said_with_what_follows_from_it():
    state, _ = begin(dict.fromkeys("abc", Restart()), 0.0)
    assert words(state, raised("b")) == [
        "`b` raised ValueError: a bug; stopping the other 2 worker(s)"
    ]


def test_an_end_is_described_in_one_line():
    error = NodeFailedError("`a` was killed\nIts last lines:\n    1", node="a")
    assert describe(ended("a", "died", error=error)) == "`a` was killed"
    assert describe(raised("a", ValueError("one\ntwo"))) == "`a` raised ValueError: one"
    assert describe(raised("a", ValueError())) == "`a` raised ValueError"
    assert describe(ended("a")) == "`a` returned"


class Storm:
    """A run whose workers, owner and clock do whatever they please."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        attempts = (0, 0, 1, 2)
        restarts = {n: Restart(attempts=self.rng.choice(attempts)) for n in "abcd"}
        self.now_s = 0.0
        self.live = {}
        self.starts = []
        self.finish = None
        self.state, actions = begin(restarts, 0.0, patience=PATIENCE)
        self.perform(actions)

    def perform(self, actions):
        for action in actions:
            match action:
                case Start():
                    assert self.state.phase == "running"
                    assert action.name not in self.live
                    self.live[action.name] = action.attempt
                case Stop() | Kill():
                    assert action.name in self.live
                case Finish():
                    assert self.finish is None
                    self.finish = action

    def event(self):
        self.now_s += self.rng.choice([0.0, 0.1, 3.0])
        due_s = next_deadline_s(self.state)
        if due_s is not None and self.rng.random() < 0.3:
            self.now_s = max(self.now_s, due_s)
            return TimeUp()
        if self.rng.random() < 0.1:
            return StopAsked(by=self.rng.choice(["signal", "a", "launcher"]))
        if not self.live:
            return TimeUp()
        name = self.rng.choice(list(self.live))
        outcome = self.rng.choice(["returned", "raised", "died", "stopped"])
        error = BUG if outcome in ("raised", "died") else None
        return ended(name, outcome, self.live.pop(name), error)


@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens_a_run_ends_once_and_starts_nobody_twice(seed):
    storm = Storm(seed)
    for _ in range(500):
        if storm.finish is not None:
            break
        storm.state, actions = decide(storm.state, storm.event(), storm.now_s)
        storm.perform(actions)
    assert storm.finish is not None
    assert set(storm.finish.left) == set(storm.live)
