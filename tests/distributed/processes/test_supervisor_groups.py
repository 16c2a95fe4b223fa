"""What only groups do: workers that fail, are cleared and start again together."""

import pytest

from replicator.distributed.processes.states import (
    Finish,
    Kill,
    Restart,
    Start,
    StopAsked,
    StopWorkers,
    TimeUp,
    Unit,
)
from replicator.distributed.processes.supervisor import next_deadline_s
from tests.distributed.processes.supervised import (
    ONE,
    THREE,
    crash,
    ended,
    failed,
    fell,
    killed,
    play,
    words,
)

GROUP = Unit(workers=("a", "b", "c"), restart=THREE)
SIGNAL = StopAsked(by="signal")


def test_all_of_a_group_start_together():
    state, _ = play([GROUP, "z"], *crash(GROUP), (9, TimeUp()))
    assert [state.worker(name).attempt for name in "abcz"] == [1, 1, 1, 0]


def test_one_failure_kills_the_others_of_its_group_only():
    state, done = play([GROUP, "z"], failed("b"))
    assert done == [[Kill(names=("a", "c"))]]
    assert (state.phase, state.failure) == ("running", None)


PREEMPTED = StopAsked(by="b", of="unit")


def test_the_others_of_a_preempted_member_are_asked_to_stop_at_once_and_no_one_else():
    state, done = play([GROUP, "z"], PREEMPTED, ended("a"), ended("c"))
    assert done == [[StopWorkers(names=("a", "c"))], [], []]
    assert (state.phase, state.stopped_by) == ("running", None)


def test_a_group_of_which_one_was_preempted_starts_again_together():
    events = ended("a"), ended("c"), failed("b", others_grace_s=10.0), (9, TimeUp())
    _, done = play([GROUP], PREEMPTED, *events)
    assert done[-1] == [Start(names=GROUP.workers, attempt=1)]


@pytest.mark.parametrize("before", [SIGNAL, failed("a", others_grace_s=9.0)])
def test_who_is_preempted_while_its_group_ends_anyway_tells_nobody(before):
    _, done = play([GROUP], before, PREEMPTED)
    assert done[-1] == []


def test_nothing_starts_before_all_of_a_group_have_ended():
    _, done = play([GROUP], failed("b"), killed("a"), (4, TimeUp()), killed("c"))
    assert done[1:] == [[], [], []]


def test_others_that_write_down_what_they_did_are_left_alone_for_a_while():
    _, done = play([GROUP], failed("a", others_grace_s=5.0), (5, TimeUp()))
    assert done == [[], [Kill(names=("b", "c"))]]


def test_who_ended_well_waits_for_the_others_and_starts_again_with_them():
    state, done = play([GROUP], ended("a"), ended("b"))
    assert state.worker("a").phase == "waiting"
    assert state.worker("c").phase == "running"
    *_, done = play([GROUP], ended("a"), ended("b"), failed("c"), (9, TimeUp()))
    assert done[-1] == [Start(names=GROUP.workers, attempt=1)]


def test_the_cause_is_blamed_though_its_symptom_was_seen_first():
    unit = Unit(workers=("a", "b", "c"))
    state, done = play([unit], fell("c"), failed("a"), killed("b"))
    assert done[-1] == [Finish(failure=failed("a"))]
    assert state.phase == "ended"


def test_symptoms_are_blamed_where_nothing_else_is():
    unit = Unit(workers=("a", "b"))
    _, done = play([unit], fell("b"), fell("a"))
    assert done[-1] == [Finish(failure=fell("b"))]


def test_who_may_not_start_again_is_not_said_to_end_the_same_way():
    for restart, said in [(Restart(), 0), (ONE, 1)]:
        state, _ = play([Unit(workers=("a",), restart=restart), "z"])
        told = words(state, failed("a", comes_again=True))
        assert len([line for line in told if "would end the same" in line]) == said


def test_who_was_killed_is_no_cause():
    unit = Unit(workers=("a", "b"))
    _, done = play([unit], fell("b"), killed("a"))
    assert done[-1] == [Finish(failure=fell("b"))]


def test_who_looks_killed_and_was_not_has_failed():
    _, done = play([GROUP], killed("a"))
    assert done == [[Kill(names=("b", "c"))]]


def test_a_group_given_up_fails_the_run_with_the_first_of_its_failures():
    unit = Unit(workers=("a", "b"), restart=ONE)
    events = [*crash(unit), (2, TimeUp()), *[(3, e) for e in crash(unit, 1)]]
    _, done = play([unit, "z"], *events, ended("z"))
    assert done[-2:] == [[StopWorkers(names=("z",))], [Finish(failure=failed("b"))]]


def test_asked_while_a_group_is_cleared_it_does_not_start_again():
    _, done = play([GROUP, "z"], failed("a"), SIGNAL, *map(killed, "bc"), ended("z"))
    assert done[1] == [StopWorkers(names=("z",))]
    assert done[-1] == [Finish(failure=failed("a"), stopped_by="signal")]


def test_what_a_group_was_cleared_for_fails_a_run_that_was_asked_to_stop_meanwhile():
    unit = Unit(workers=("a", "b"))
    _, done = play([unit, "z"], fell("b"), SIGNAL, failed("a"), ended("z"))
    assert done[-1] == [Finish(failure=failed("a"), stopped_by="signal")]
    _, done = play([unit], fell("b"), SIGNAL, killed("a"))
    assert done[-1] == [Finish(failure=fell("b"), stopped_by="signal")]


def test_a_symptom_of_a_group_does_not_hide_why_the_run_fails():
    _, done = play([GROUP, "z"], fell("a"), failed("z"), *map(killed, "bc"))
    assert done[-1] == [Finish(failure=failed("z"))]


def test_a_cleared_group_that_cannot_be_killed_fails_a_run_that_stops():
    _, done = play([GROUP], failed("a"), SIGNAL, killed("b"), (9, TimeUp()))
    assert done[-1] == [Finish(failure=failed("a"), stopped_by="signal", left=("c",))]


def test_the_failure_of_another_stops_a_group_too():
    _, done = play([GROUP, "z"], failed("z"))
    assert done == [[StopWorkers(names=GROUP.workers)]]


def test_a_group_that_cannot_be_killed_fails_the_run():
    state, done = play([GROUP, "z"], failed("a"), killed("b"), (5, TimeUp()))
    assert done[-1] == [StopWorkers(names=("z",))]
    assert (state.phase, state.failure) == ("stopping", failed("a"))
    _, done = play([GROUP], failed("a"), killed("b"), (5, TimeUp()))
    assert done[-1] == [Finish(failure=failed("a"), left=("c",))]


def test_nothing_is_started_beside_what_cannot_be_killed():
    other = Unit(workers=("z",), restart=ONE)
    state, done = play(
        [other, GROUP], (0, failed("b")), (0, failed("z")), (9, TimeUp())
    )
    assert done[-1] == [Finish(failure=failed("b"), left=("a", "c"))]
    assert next_deadline_s(state) is None


def test_that_one_cannot_be_killed_is_said():
    state, _ = play([GROUP], failed("a"), killed("b"))
    assert words(state, TimeUp(), 9.0) == ["`c` cannot be killed"]


def test_a_preempted_worker_takes_its_group_along_untold_and_stops_the_run():
    preempted = ended("a", outcome="preempted")
    state, done = play([GROUP, "z"], preempted, ended("b"), ended("z"), ended("c"))
    assert done == [[StopWorkers(names=("z",))], [], [], [Finish(stopped_by="a")]]
    assert state.failure is None


def test_a_preempted_group_is_killed_after_the_grace():
    _, done = play([GROUP], ended("a", outcome="preempted"), (10, TimeUp()))
    assert done[-1] == [Kill(names=("b", "c"))]


def test_the_end_of_an_attempt_before_changes_nothing():
    events = [*crash(GROUP), (9, TimeUp())]
    before, _ = play([GROUP], *events)
    after, done = play([GROUP], *events, failed("a"))
    assert (after, done[-1]) == (before, [])


@pytest.mark.parametrize("others_grace_s", [0.0, 5.0])
def test_a_group_of_one_is_a_worker(others_grace_s):
    one = Unit(workers=("a",), restart=Restart(attempts=1, backoff_s=0.0))
    state, done = play([one], failed("a", others_grace_s=others_grace_s))
    assert done == [[Start(names=("a",), attempt=1)]]
    assert state.worker("a").phase == "running"
