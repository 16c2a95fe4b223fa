"""What the end of a worker of a program is to the supervisor."""

import pytest

from replicator.distributed.processes.states import Finish, StopAsked, Unit
from replicator.errors import ConnectionLostError, NodeFailedError, RemoteError
from replicator.exit_codes import HUNG
from replicator.launchpad_bridge.protocols import Exited
from replicator.launchpad_bridge.running.exit_mapping import ended, first_failure
from tests.distributed.processes.supervised import ended as done_well
from tests.distributed.processes.supervised import play

GONE = [
    ConnectionLostError("gone"),
    RemoteError("gone", type_name="ServerStoppedError"),
    NodeFailedError("`b` raised"),
]
GONE[2].__cause__ = ConnectionLostError("gone")


def exited(outcome, error=None):
    return Exited(name="a", attempt=0, outcome=outcome, error=error)


@pytest.mark.parametrize(
    ("outcome", "meaning"),
    [("returned", "done"), ("stopped", "done"), ("raised", "failed")],
)
def test_what_raised_has_failed(outcome, meaning):
    assert ended(exited(outcome)).outcome == meaning


@pytest.mark.parametrize(("stops", "meaning"), [(False, "failed"), (True, "done")])
def test_who_is_preempted_has_failed_but_where_all_are_to_stop(stops, meaning):
    assert ended(exited("preempted"), is_stopping=stops).outcome == meaning


def test_the_others_of_a_group_may_save_when_one_is_preempted():
    end = ended(exited("preempted"), is_member=True, stop_grace_s=7.0)
    assert end.others_grace_s == 7.0
    assert ended(exited("raised"), is_member=True, stop_grace_s=7).others_grace_s == 0


def test_what_died_without_a_word_has_failed_or_was_killed():
    end = ended(exited("died"))
    assert (end.outcome, end.looks_killed) == ("failed", True)


def test_what_is_killed_when_all_results_are_there_has_not_failed():
    assert ended(exited("died"), is_needed=False).outcome == "done"
    assert ended(exited("raised"), is_needed=False).outcome == "failed"


@pytest.mark.parametrize("error", GONE, ids=["own", "remote", "wrapped"])
def test_that_a_peer_is_gone_is_a_symptom(error):
    assert ended(exited("raised", error)).is_symptom


@pytest.mark.parametrize("error", [None, ValueError("a bug")])
def test_a_bug_is_no_symptom(error):
    assert not ended(exited("raised", error)).is_symptom


def test_what_the_launcher_said_is_kept():
    said = exited("returned")
    assert ended(said).exited is said


def test_an_end_is_described_in_one_line():
    error = NodeFailedError("`a` was killed\nIts last lines:\n    1", node="a")
    assert ended(exited("died", error)).text == "`a` was killed"
    lines = exited("raised", ValueError("one\ntwo"))
    assert ended(lines).text == "`a` raised ValueError: one"
    assert ended(exited("raised", ValueError())).text == "`a` raised ValueError"
    assert ended(exited("returned")).text == "`a` returned"


def died(code, text="`a` was killed"):
    return Exited(
        name="a",
        attempt=0,
        outcome="died",
        error=NodeFailedError(text, node="a"),
        code=code,
    )


@pytest.mark.parametrize(
    ("code", "looks_killed"),
    [(None, True), (-9, True), (137, True), (-6, False), (1, False)],
)
def test_only_a_kill_looks_like_one(code, looks_killed):
    assert ended(died(code)).looks_killed == looks_killed


@pytest.mark.parametrize(("is_member", "expected"), [(False, False), (True, True)])
def test_of_a_group_a_lost_collective_is_a_symptom(is_member, expected):
    words = "`a` raised XlaRuntimeError\nGloo all-reduce failed: closed by peer"
    assert ended(died(1, words), is_member=is_member).is_symptom == expected


@pytest.mark.parametrize(("is_member", "grace_s"), [(False, 0.0), (True, 5.0)])
def test_when_one_of_a_group_hung_the_others_may_write_their_stacks(is_member, grace_s):
    assert ended(died(HUNG), is_member=is_member).others_grace_s == grace_s


@pytest.mark.parametrize(("is_member", "expected"), [(False, False), (True, True)])
def test_a_group_does_not_go_on_into_the_same_nan(is_member, expected):
    error = NodeFailedError("`a` raised")
    error.__cause__ = RemoteError("nan", type_name="NonFiniteError")
    assert ended(exited("raised", error), is_member=is_member).comes_again == expected


def raised(cause, lines=""):
    error = NodeFailedError(f"`a` raised\nIts last lines:\n  {lines}", node="a")
    error.__cause__ = cause
    return Exited(name="a", attempt=0, outcome="raised", error=error)


def test_what_a_member_printed_before_it_raised_makes_no_symptom_of_its_error():
    printed = "an actor went away: connection reset by peer"
    assert not ended(
        raised(OSError("no space left"), printed), is_member=True
    ).is_symptom


def test_a_member_s_own_error_that_names_a_lost_collective_is_a_symptom():
    assert ended(
        raised(RemoteError("Gloo all-reduce failed: timeout")), is_member=True
    ).is_symptom


def stopped(error, *more, kills=False):
    """Return the state after a stop in which one of two failed."""
    unit = Unit(workers=("a", "b"))
    events = [StopAsked(by="z"), *[StopAsked(by="signal")] * 2 * kills]
    end = ended(raised(error), is_member=True)
    state, done = play([unit], *events, end, *more)
    return state, done[-1]


def test_who_lost_a_collective_while_nobody_failed_is_found():
    state, done = stopped(RuntimeError("Gloo all-reduce failed"), done_well("b"))
    assert done == [Finish(stopped_by="z")]
    assert first_failure(state).name == "a"


@pytest.mark.parametrize(
    ("error", "kills"),
    [(RuntimeError("Gloo all-reduce failed"), True), (ConnectionLostError(""), False)],
    ids=["killed", "its server ended first"],
)
def test_other_symptoms_of_a_stop_are_no_failures(error, kills):
    state, _ = stopped(error, done_well("b"), kills=kills)
    assert first_failure(state) is None
