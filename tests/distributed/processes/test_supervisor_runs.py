"""What a run of many workers does: how it stops, whom it blames, when it is over."""

import pytest

from replicator.distributed.processes.states import (
    Finish,
    Kill,
    Start,
    StopAsked,
    StopWorkers,
    TimeUp,
)
from replicator.distributed.processes.supervisor import begin, decide, next_deadline_s
from tests.distributed.processes.supervised import (
    ONE,
    alone,
    ended,
    failed,
    fell,
    killed,
    play,
    words,
)

SIGNAL = StopAsked(by="signal")


def test_a_run_without_workers_is_over_at_once():
    _, actions = begin([], 0.0)
    assert actions == [Finish()]


def test_all_workers_are_started_at_first():
    _, actions = begin([alone("a"), alone("b")], 0.0)
    assert actions == [Start(names=(name,), attempt=0) for name in "ab"]


def test_a_run_ends_well_when_all_workers_have_ended():
    state, done = play("ab", ended("a"), ended("b"))
    assert done == [[], [Finish()]]
    assert state.phase == "ended"


def test_one_failure_stops_the_others_at_once():
    state, done = play("abc", failed("b"))
    assert done == [[StopWorkers(names=("a", "c"))]]
    assert (state.phase, state.failure) == ("stopping", failed("b"))


def test_to_look_killed_is_a_failure_like_any_other():
    _, done = play("ab", killed("a"), ended("b"))
    assert done[1] == [Finish(failure=killed("a"))]


def test_the_failure_of_the_last_worker_ends_the_run():
    _, done = play("ab", ended("a"), failed("b"))
    assert done[1] == [Finish(failure=failed("b"))]


def test_the_first_failure_is_named_whatever_follows():
    _, done = play("abc", failed("b"), failed("a"), ended("c"))
    assert done[-1] == [Finish(failure=failed("b"))]


def test_who_does_not_stop_is_killed_after_the_grace():
    state, done = play("abc", failed("b"), ended("a"), (9.9, TimeUp()), (10, TimeUp()))
    assert done[1:] == [[], [], [Kill(names=("c",))]]
    assert state.phase == "killing"


def test_a_worker_that_was_killed_is_no_failure_of_a_clean_stop():
    _, done = play("a", StopAsked(by="a"), (10, TimeUp()), (11, killed("a")))
    assert done[1:] == [[Kill(names=("a",))], [Finish(stopped_by="a")]]


def test_who_cannot_be_killed_is_left_behind_by_name():
    _, done = play("ab", failed("a"), (10, TimeUp()), (15, TimeUp()))
    assert done[-1] == [Finish(failure=failed("a"), left=("b",))]


def test_a_worker_may_ask_for_the_stop_of_all():
    _, done = play("ab", StopAsked(by="b"), ended("a"), ended("b"))
    assert done[0] == [StopWorkers(names=("a", "b"))]
    assert done[-1] == [Finish(stopped_by="b")]


def test_asking_again_changes_nothing():
    state, done = play("ab", StopAsked(by="b"), (5, StopAsked(by="launcher")))
    assert done[1] == []
    assert (state.stopped_by, next_deadline_s(state)) == ("b", 10)


def test_a_second_signal_kills_at_once():
    _, done = play("ab", SIGNAL, ended("b"), SIGNAL, killed("a"))
    assert done[2:] == [[Kill(names=("a",))], [Finish(stopped_by="signal")]]


def test_a_third_signal_does_nothing_more():
    _, done = play("a", SIGNAL, SIGNAL, SIGNAL)
    assert done[2] == []


def test_the_first_signal_of_a_run_that_stops_anyway_only_warns():
    state, done = play("ab", failed("a"))
    assert words(state, SIGNAL) == ["already stopping; once more kills all"]
    state, done = play("ab", failed("a"), SIGNAL)
    assert done[1] == []
    assert words(state, SIGNAL) == ["killing all that still run"]


def test_a_failure_while_stopping_fails_the_run():
    _, done = play("ab", StopAsked(by="a"), failed("b"), ended("a"))
    assert done[-1] == [Finish(failure=failed("b"), stopped_by="a")]


def test_that_a_peer_is_gone_is_no_failure_of_a_run_that_stops():
    _, done = play("ab", StopAsked(by="a"), fell("b"), ended("a"))
    assert done[-1] == [Finish(stopped_by="a")]


def test_the_cause_is_blamed_not_the_symptom_that_was_noticed_before():
    _, done = play("abc", fell("b"), failed("a"), ended("c"))
    assert done[-1] == [Finish(failure=failed("a"))]


def test_a_symptom_without_a_cause_is_the_failure():
    _, done = play("ab", fell("b"), ended("a"))
    assert done[-1] == [Finish(failure=fell("b"))]


@pytest.mark.parametrize("event", [ended("a", attempt=1), ended("x"), TimeUp()])
def test_what_is_not_expected_changes_nothing(event):
    before, _ = play("ab")
    assert decide(before, event, 1.0) == (before, [])


@pytest.mark.parametrize("event", [ended("a"), SIGNAL, TimeUp(), failed("a")])
def test_nothing_happens_after_the_end(event):
    over, _ = play("a", ended("a"))
    assert decide(over, event, 99.0) == (over, [])


def test_restarts_are_said_with_their_number_and_reason():
    state, _ = play([alone("a", ONE)])
    assert words(state, failed("a")) == [
        "`a` ended",
        "starting it again in 0.5 s (restart 1 of 1 without progress)",
    ]


def test_a_failure_is_said_with_what_follows_from_it():
    state, _ = play("abc")
    assert words(state, failed("b")) == ["`b` ended", "stopping the other 2 worker(s)"]


def test_a_failure_that_tells_nothing_new_is_said_with_its_time():
    state, _ = play("abc", failed("b"))
    assert words(state, failed("a")) == ["`a` ended (while the run was stopping)"]


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ("a", "`a` asked for a stop: all have 10 s to end"),
        ("the launcher", "the launcher asked for a stop: all have 10 s to end"),
        (
            "signal",
            "Ctrl-C or a signal asked for a stop: all have 10 s to end; once more "
            "kills them",
        ),
    ],
)
def test_who_asked_for_a_stop_is_said(by, said):
    state, _ = play("ab")
    assert words(state, StopAsked(by=by)) == [said]


def test_who_is_killed_for_being_late_is_said():
    state, _ = play("ab", StopAsked(by="a"))
    late = words(state, TimeUp(), 10.0)
    assert late == ["killing `a`, `b`: not stopped within the grace"]


def test_a_worker_s_state_is_told_by_its_name():
    state, _ = play([alone("a", ONE), alone("b")], failed("a"))
    worker = state.worker("a")
    assert (worker.phase, worker.attempt, worker.ended) == ("waiting", 0, failed("a"))
    state, _ = play([alone("a", ONE), alone("b")], failed("a"), (3, TimeUp()))
    assert state.worker("a").started_s == 3
