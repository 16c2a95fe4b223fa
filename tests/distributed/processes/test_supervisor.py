"""Laws for all kinds of units: how one fails, starts again, and is given up."""

import dataclasses
import itertools
import math
import random

import pytest

from replicator.distributed.processes.states import (
    Finish,
    Kill,
    Restart,
    Start,
    StopAsked,
    StopWorkers,
    Timeouts,
    TimeUp,
    Unit,
)
from replicator.distributed.processes.supervisor import begin, decide, next_deadline_s
from tests.distributed.processes.supervised import (
    ONE,
    THREE,
    TIMEOUTS,
    alone,
    crash,
    ended,
    failed,
    killed,
    play,
    words,
)

KINDS = {
    "worker": Unit(workers=("a",), restart=THREE),
    "group": Unit(workers=("a", "b", "c"), restart=THREE, called="all"),
}
SIGNAL = StopAsked(by="signal")


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def unit(request):
    return request.param


def with_restart(unit, **restart):
    return dataclasses.replace(
        unit, restart=dataclasses.replace(unit.restart, **restart)
    )


def crash_loop(unit, *, runs_s=0.0, times=20, steps=None):
    """Let a unit fail again and again; return when it was started, and the end."""
    state, _ = begin([unit, alone("z")], 0.0, timeouts=TIMEOUTS)
    now_s, starts = 0.0, []
    steps = steps or itertools.repeat(None)
    for attempt, step in zip(range(times), steps, strict=False):
        now_s += runs_s
        for event in crash(unit, attempt, safe_step=step):
            state, actions = decide(state, event, now_s)
        now_s = next_deadline_s(state) or now_s
        if state.phase != "running":
            break
        if state.units[0].phase == "waiting":
            state, actions = decide(state, TimeUp(), now_s)
        starts.append(now_s)
        assert actions[-1] == Start(names=unit.workers, attempt=attempt + 1)
    return starts, state, actions


def test_a_failed_unit_is_started_again_whole_after_a_while(unit):
    events = [(0, event) for event in crash(unit)]
    state, done = play([unit, "z"], *events, (0.4, TimeUp()), (0.5, TimeUp()))
    assert done[-2:] == [[], [Start(names=unit.workers, attempt=1)]]
    assert state.units[0].live == unit.workers
    assert state.phase == "running"


def test_a_crash_loop_has_as_many_restarts_as_allowed_ever_further_apart(unit):
    starts, state, actions = crash_loop(unit)
    assert starts == [0.5, 1.5, 3.5]
    assert state.phase == "stopping"
    assert StopWorkers(names=("z",)) in actions


def test_the_first_failure_of_a_crash_loop_is_the_one_that_is_told(unit):
    _, state, _ = crash_loop(unit)
    assert (state.failure.name, state.failure.attempt) == (unit.workers[-1], 0)


def test_the_wait_before_a_restart_has_a_bound(unit):
    starts, _, _ = crash_loop(with_restart(unit, attempts=12))
    waits = [after - before for before, after in itertools.pairwise(starts)]
    assert max(waits) == waits[-1] == 30


def test_a_wait_has_its_bound_after_thousands_of_restarts_too(unit):
    starts, _, _ = crash_loop(with_restart(unit, attempts=2000), times=1500)
    assert len(starts) == 1500


def test_restarts_at_once_come_before_the_waits(unit):
    starts, _, _ = crash_loop(dataclasses.replace(unit, restarts_at_once=1))
    assert starts == [0.0, 0.5, 1.5]


def test_who_ran_long_enough_has_all_restarts_again(unit):
    unit = with_restart(unit, attempts=1)
    starts, state, _ = crash_loop(unit, runs_s=60.0, times=10)
    assert len(starts) == 10
    assert state.phase == "running"


def test_a_step_that_is_safe_forgives_all_restarts_before_it(unit):
    unit = with_restart(unit, attempts=1, progress_s=math.inf)
    starts, state, _ = crash_loop(unit, times=10, steps=itertools.count())
    assert len(starts) == 10
    assert (state.units[0].idle_restarts, state.units[0].safe_step) == (1, 9)


def test_the_same_step_again_is_no_progress(unit):
    unit = with_restart(unit, attempts=1)
    starts, state, _ = crash_loop(unit, steps=itertools.repeat(7))
    assert len(starts) == 1
    assert state.phase == "stopping"


def test_progress_forgets_the_failures_before_it(unit):
    unit = with_restart(unit, attempts=1)
    _, state, _ = crash_loop(unit, steps=iter([None, 3, 3]))
    assert state.failure.attempt == 1


def test_the_time_in_which_the_others_are_cleared_is_no_progress():
    unit = Unit(workers=("a", "b"), restart=dataclasses.replace(ONE, progress_s=5))
    events = crash(unit)
    again = [dataclasses.replace(event, attempt=1) for event in events]
    timed = [(0, events[0]), (9, events[1]), (10, TimeUp()), (11, again[0])]
    state, _ = play([unit], *timed, (20, again[1]))
    assert state.failure is not None


def test_what_would_come_again_is_not_started_again(unit):
    state, done = play([unit], *crash(unit, comes_again=True))
    assert done[-1] == [Finish(failure=state.failure)]


def test_without_restarts_the_first_failure_fails_the_run(unit):
    unit = dataclasses.replace(unit, restart=Restart())
    _, done = play([unit, "z"], *crash(unit), ended("z"))
    assert done[-2] == [StopWorkers(names=("z",))]
    assert done[-1] == [Finish(failure=failed(unit.workers[-1]))]


def test_who_waits_for_a_restart_does_not_come_back_once_the_run_stops(unit):
    _, done = play([unit, "z"], *crash(unit), failed("z"), (99, TimeUp()))
    assert done[-2:] == [[Finish(failure=failed("z"))], []]


def test_a_run_whose_units_all_wait_stops_at_once_when_asked(unit):
    _, done = play([unit], *crash(unit), SIGNAL)
    assert done[-1] == [Finish(stopped_by="signal")]


def test_a_run_is_not_over_while_a_unit_waits_for_its_restart(unit):
    state, done = play([unit, "z"], *crash(unit), ended("z"))
    assert done[-1] == []
    assert state.phase == "running"


def test_a_unit_that_ended_well_is_not_started_again(unit):
    _, done = play([unit], *map(ended, unit.workers))
    assert done[-1] == [Finish()]


def test_a_restart_is_said_with_its_number_and_what_is_safe(unit):
    *events, last = crash(unit, safe_step=7)
    state, _ = play([unit], *events)
    assert words(state, last)[-1] == (
        f"starting {unit.called} again in 0.5 s (restart 1 of 3 without progress; step "
        "7 is safe)"
    )


def test_that_a_unit_is_given_up_is_said(unit):
    unit = dataclasses.replace(with_restart(unit, attempts=1), restarts_at_once=1)
    *events, last = [*crash(unit), *crash(unit, attempt=1)]
    state, _ = play([unit], *events)
    assert words(state, last)[-1] == "gave up after 1 restart(s) without progress"


@pytest.mark.parametrize("kills", [1, 2])
def test_who_does_not_stop_is_killed_ever_harder_then_left_by_name(unit, kills):
    timeouts = dataclasses.replace(TIMEOUTS, kills=kills)
    times = [(10 + 5 * i, TimeUp()) for i in range(kills + 1)]
    _, done = play([unit], (0, SIGNAL), *times, timeouts=timeouts)
    expected = [[Kill(names=unit.workers)]] * kills
    assert done[1:-1] == expected
    assert done[-1] == [Finish(stopped_by="signal", left=unit.workers)]


class Storm:
    """A run whose workers, owner and clock do whatever they please."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.live = {}
        self.finish = None
        timeouts = Timeouts(stop_grace_s=10, kill_grace_s=5, kills=seed % 2 + 1)
        units = [self.unit(names) for names in ("a", "b", "cd", "efg")]
        self.group_of = {name: u.workers for u in units for name in u.workers}
        self.state, actions = begin(units, 0.0, timeouts=timeouts)
        self.perform(actions)

    def unit(self, names):
        return Unit(
            workers=tuple(names),
            restart=Restart(attempts=self.rng.choice((0, 0, 1, 2))),
            restarts_at_once=self.rng.choice((0, 1)),
        )

    def perform(self, actions):
        for action in actions:
            match action:
                case Start():
                    assert self.state.phase == "running"
                    assert not self.live.keys() & set(action.names)
                    assert action.names == self.group_of[action.names[0]]
                    self.live |= dict.fromkeys(action.names, action.attempt)
                case StopWorkers() | Kill():
                    assert self.live.keys() >= set(action.names)
                case Finish():
                    assert self.finish is None
                    self.finish = action

    def event(self):
        self.now_s += self.rng.choice([0.0, 0.1, 3.0])
        due_s = next_deadline_s(self.state)
        if due_s is not None and self.rng.random() < 0.3:
            self.now_s = max(self.now_s, due_s)
            return TimeUp()
        if self.rng.random() < 0.05:
            return StopAsked(by=self.rng.choice(["signal", "a", "launcher"]))
        if not self.live:
            return TimeUp()
        if self.rng.random() < 0.1:
            return StopAsked(by=self.rng.choice(list(self.live)), of="unit")
        name = self.rng.choice(list(self.live))
        attempt, symptom = self.live.pop(name), self.rng.random() < 0.3
        how = self.rng.choice([ended, failed, killed, preempted])
        return how(name, attempt, is_symptom=symptom)


def preempted(name, attempt=0, **how):
    return ended(name, attempt, outcome="preempted", **how)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_happens_a_run_ends_once_and_starts_nobody_twice(seed):
    storm = Storm(seed)
    for _ in range(500):
        if storm.finish is not None:
            break
        storm.state, actions = decide(storm.state, storm.event(), storm.now_s)
        storm.perform(actions)
        runs = storm.state.phase == "running" and storm.live
        assert runs or storm.finish or next_deadline_s(storm.state) is not None
    assert storm.finish is not None
    assert set(storm.finish.left) == set(storm.live)


def test_every_phase_but_running_has_its_end_in_time():
    for seed in range(50):
        storm = Storm(seed)
        while storm.finish is None:
            storm.state, actions = decide(storm.state, storm.event(), storm.now_s)
            storm.perform(actions)
            for unit in storm.state.units:
                waits = unit.phase in ("clearing", "waiting")
                is_stopping = storm.state.phase in ("stopping", "killing")
                if waits or (is_stopping and unit.phase == "running"):
                    assert unit.due_s is not None
