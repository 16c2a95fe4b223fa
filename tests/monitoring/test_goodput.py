"""Goodput: notes of processes in, useful time and causes of loss out; then for real."""

import datetime
import random
import subprocess
import sys

import pytest

from replicator.hooks import StateEvent
from replicator.monitoring.events import EventLog, read_events
from replicator.monitoring.goodput import goodput
from replicator.monitoring.phases import Phases
from replicator.monitoring.progress import Progress
from replicator.training.reports.phase_journal import JournalPhases, process_age_s
from tests.fakes import FakeClock

EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def note(at_s, session, step, seconds, *, launch_s=0.0, process=0):
    """A note at `at_s` by the calendar; `seconds` are those of the process so far."""
    return {
        "time": (EPOCH + datetime.timedelta(seconds=at_s)).isoformat(),
        "kind": "phases",
        "process": process,
        "session": session,
        "step": step,
        "seconds": seconds,
        "launch_s": launch_s,
    }


def killed_once(*, restored_step, launch_s=3.0):
    """Steps of 0.1 s; a note at step 100, a kill, a start 10 s after the note."""
    return [
        note(1, "a", 0, {"start": 1}),
        note(11, "a", 100, {"start": 1, "step": 10}),
        note(22, "b", restored_step, {"start": 1}, launch_s=launch_s),
        note(32, "b", restored_step + 100, {"start": 1, "step": 10}),
    ]


def test_one_process_loses_what_was_not_steps():
    spent = {"start": 2, "compile": 1, "input": 2, "step": 7}
    found = goodput([note(2, "a", 0, {"start": 2}), note(12, "a", 70, spent)])
    assert (found.useful_s, found.wall_s, found.sessions) == (7, 12, 1)
    assert found.lost_s == {"start": 2, "compile": 1, "input": 2}
    assert found.share == pytest.approx(7 / 12)


def test_steps_done_again_are_lost_and_so_is_the_way_to_a_new_process():
    found = goodput(killed_once(restored_step=80))
    assert found.lost_s == pytest.approx(
        {"redone": 2.0, "launch": 3.0, "down": 7.0, "start": 2.0}
    )
    assert found.useful_s == pytest.approx(18.0)
    assert (found.wall_s, found.sessions) == (pytest.approx(32.0), 2)


def test_steps_saved_after_the_last_note_of_a_killed_process_count():
    found = goodput(killed_once(restored_step=130))
    assert found.useful_s == pytest.approx(10 + 3 + 10)
    assert found.lost_s["down"] == pytest.approx(7.0 - 3.0)
    assert "redone" not in found.lost_s


def test_a_run_that_begins_anew_loses_all_steps_before():
    found = goodput(killed_once(restored_step=0))
    assert found.lost_s["redone"] == pytest.approx(10.0)
    assert found.useful_s == pytest.approx(10.0)


def test_many_kills_are_each_charged_for_their_own_steps():
    events, at_s = [], 0.0
    for session in range(10):
        first = 50 * session  # 100 steps each, of which 50 were saved
        events += [
            note(at_s, f"{session}", first, {}),
            note(at_s + 100, f"{session}", first + 100, {"step": 100}),
        ]
        at_s += 105
    found = goodput(events)
    assert found.useful_s == pytest.approx(9 * 50 + 100)
    assert found.lost_s == pytest.approx({"redone": 9 * 50, "down": 9 * 5})


def test_a_rollback_inside_a_process_is_lost_time():
    found = goodput(
        [
            note(0, "a", 0, {}),
            note(10, "a", 100, {"step": 10}),
            note(20, "a", 60, {"step": 20}),  # back to 50, say, and on
            note(30, "a", 160, {"step": 30}),
        ]
    )
    assert found.lost_s == pytest.approx({"redone": 4.0})
    assert found.useful_s == pytest.approx(26.0)


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_calendar_that_jumps_inside_a_process_changes_nothing(jump_s):
    calm = [note(t, "a", 10 * t, {"step": t}) for t in (0, 10, 20, 30)]
    jumped = [note(t + jump_s * (t > 5), "a", 10 * t, {"step": t}) for t in (0, 10, 30)]
    assert goodput(jumped) == goodput(calm)


def test_a_calendar_that_went_back_between_processes_counts_as_no_time():
    found = goodput(
        [
            note(0, "a", 0, {}),
            note(10, "a", 100, {"step": 10}),
            note(-3600, "b", 100, {}, launch_s=3),
            note(-3590, "b", 200, {"step": 10}),
        ]
    )
    assert (found.useful_s, found.wall_s, found.lost_s) == (20, 20, {})


def test_the_time_before_the_first_process_began_its_run_is_not_the_runs():
    found = goodput([note(5, "a", 0, {"start": 1}, launch_s=3600.0)])
    assert (found.wall_s, found.lost_s) == (1, {"start": 1})


def test_only_the_first_process_of_each_start_counts():
    events = killed_once(restored_step=80)
    others = [event | {"process": 1, "session": "z"} for event in events]
    assert goodput([*others, *events]) == goodput(events)


def test_other_events_are_no_notes_and_no_events_are_no_time():
    assert goodput([{"kind": "saved", "time": EPOCH.isoformat()}]) == goodput([])
    assert goodput([]).share == 0.0


def test_all_seconds_add_up_whatever_happened():
    rng = random.Random(0)
    for _ in range(100):
        events, at_s, step = [], 0.0, 0
        for session in range(rng.randrange(1, 6)):
            seconds = {"start": 0.0, "step": 0.0, "save": 0.0}
            step = rng.randrange(step + 20)
            for _ in range(rng.randrange(1, 6)):
                events.append(note(at_s, f"{session}", step, dict(seconds), launch_s=2))
                for phase in seconds:
                    seconds[phase] += rng.random() * 5
                at_s += rng.uniform(-5, 20)
                step = max(0, step + rng.randrange(-5, 50))
        found = goodput(events)
        assert found.useful_s >= 0
        assert all(lost_s > 0 for lost_s in found.lost_s.values())
        assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(
            found.wall_s
        )


def test_a_weeks_notes_are_added_up_quickly():
    events = [note(10 * n, "a", n, {"step": 10.0 * n}) for n in range(60_000)]
    assert goodput(events).useful_s == pytest.approx(10.0 * 59_999)


def state_event(clock, step):
    numbers = Progress(clock, steps=None).update(step=step, examples=0, stall_s=0.0)
    return StateEvent(
        step=step, advanced=1, examples=0, progress=numbers, read_state=dict
    )


def test_a_journal_of_a_run_tells_its_goodput(tmp_path):
    clock = FakeClock(100.0)
    phases, log = Phases(clock), EventLog(tmp_path, clock=clock)
    clock.advance(4.0)
    hook = JournalPhases(log, phases, start_step=40)
    for step in range(41, 91):
        phases.enter("step", step=step)
        clock.advance(0.5)
        hook.on_state(state_event(clock, step))
    phases.enter("save")
    clock.advance(1.0)
    hook.close()
    notes = read_events(tmp_path)
    assert [event["step"] for event in notes] == [40, 61, 81, 90]
    assert notes[0]["seconds"] == {"start": 4.0}
    found = goodput(notes)
    assert found.useful_s == pytest.approx(25.0)
    assert found.lost_s == pytest.approx({"start": 4.0, "save": 1.0})


def test_a_process_knows_its_age():
    age_s = process_age_s()
    assert age_s is not None
    assert 0 < age_s < 24 * 3600
    assert (process_age_s() or 0) >= age_s


# A run without a model: steps of 10 ms, a note every 0.1 s, until it is killed.
RUN = """
import sys, threading
from replicator.base.host.clock import SystemClock
from replicator.monitoring.events import EventLog
from replicator.hooks import StateEvent
from replicator.training.reports.phase_journal import JournalPhases
from replicator.monitoring.phases import Phases
from replicator.monitoring.progress import ProgressNumbers

directory, step = sys.argv[1], int(sys.argv[2])
phases = Phases()
hook = JournalPhases(EventLog(directory), phases, start_step=step, interval_s=0.1)
while True:
    phases.enter("step", step=step)
    threading.Event().wait(0.01)
    step += 1
    numbers = ProgressNumbers(step=step, steps=None, time_s=phases.clock.now_s())
    hook.on_state(
        StateEvent(step=step, advanced=1, examples=0, progress=numbers, read_state=dict)
    )
    print(step, flush=True)
"""


def run_until_killed(directory, *, start_step, steps):
    """Start a run, kill it after so many steps; return the last step that it told."""
    command = [sys.executable, "-c", RUN, str(directory), str(start_step)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        step = start_step
        try:
            while step < start_step + steps:
                step = int(child.stdout.readline())
        finally:
            child.kill()
    return step


@pytest.mark.slow
def test_a_run_that_is_killed_for_real_tells_what_was_lost(tmp_path):
    last = run_until_killed(tmp_path, start_step=0, steps=100)
    run_until_killed(tmp_path, start_step=last - 50, steps=100)
    found = goodput(read_events(tmp_path))
    assert found.sessions == 2
    assert found.useful_s + sum(found.lost_s.values()) == pytest.approx(found.wall_s)
    # Fifty steps of at least 10 ms, less those after the last note of the first run.
    assert found.lost_s["redone"] > 0.2
    assert found.lost_s["launch"] > 0.1
