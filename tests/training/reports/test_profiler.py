"""Profiles: what decides as a table, then real traces of real steps."""

import gzip
import json
import logging
import os
import signal
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from replicator.base.flat_tree import whole
from replicator.errors import ArgumentError
from replicator.hooks import StateEvent, StepEvent
from replicator.monitoring.events import EventLog, read_events
from replicator.monitoring.progress import Progress
from replicator.training.reports.profiler import (
    Profile,
    ProfileState,
    decide,
)
from tests.fakes import FakeClock

NUMBERS = Progress(FakeClock(), steps=None).update(step=1, examples=0, stall_s=0.0)


def actions(*, wanted=None, requests=(), steps=20, advanced=1):
    """Put every call of a run through `decide`; list what is done after which step."""
    state, done = ProfileState(wanted=wanted), []
    asked = dict(requests)
    for step in range(advanced, steps + 1, advanced):
        event = StepEvent(step=step, advanced=advanced, examples=0, progress=NUMBERS)
        state, action = decide(state, event, requested=asked.get(step, 0))
        if action is not None:
            done.append((step, action))
    return done


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"wanted": range(5, 8)}, [(4, "start"), (7, "stop")]),
        ({"wanted": range(1, 3)}, [(1, "start"), (2, "stop")]),
        ({"wanted": range(1, 2)}, []),
        ({"wanted": range(15, 99)}, [(14, "start")]),
        ({"requests": {3: 2}}, [(3, "start"), (5, "stop")]),
        ({"requests": {3: 2, 4: 5}}, [(3, "start"), (9, "stop")]),
        ({"requests": {3: 5, 4: 2}}, [(3, "start"), (8, "stop")]),
        ({"wanted": range(6, 8), "requests": {4: 4}}, [(4, "start"), (8, "stop")]),
        ({"wanted": range(9, 11), "advanced": 4}, [(8, "start"), (12, "stop")]),
        ({"wanted": range(10, 11), "advanced": 4}, [(8, "start"), (12, "stop")]),
        ({}, []),
    ],
)
def test_a_trace_holds_the_steps_that_were_asked_for(plan, expected):
    assert actions(**plan) == expected


@pytest.mark.parametrize("steps", [range(5, 5), range(3), range(2, 9, 2), range(9, 2)])
def test_steps_must_be_a_window(steps, tmp_path):
    with pytest.raises(ArgumentError, match=r"`steps` must be a range of steps from 1"):
        Profile(tmp_path, steps=steps)


@pytest.fixture
def profile(tmp_path):
    """Make profiles that are closed whatever happens."""
    made = []

    def make(**options):
        made.append(Profile(tmp_path / "profile", **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(hook, *, steps, first=1, and_end=True):
    """Run a small program for so many steps; show each to the hook."""
    square = jax.jit(lambda x: jnp.tanh(x @ x))
    state, event = jnp.eye(8), None
    for step in range(first, first + steps):
        state = square(state)
        event = StateEvent(
            step=step,
            advanced=1,
            examples=0,
            progress=NUMBERS,
            read_state=partial(whole, state),
        )
        hook.on_state(event)
    if and_end:
        hook.on_end(event)


def marked_steps(folder):
    """List the steps that a trace knows by number."""
    [file] = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    found = [event for event in events if event.get("name") == "step"]
    return sorted(int(event["args"]["step_num"]) for event in found)


def test_a_trace_of_the_steps_asked_for_is_there_and_told(tmp_path, profile):
    run(profile(steps=range(3, 6), events=EventLog(tmp_path)), steps=8)
    folder = tmp_path / "profile" / "from_step_3"
    assert marked_steps(folder) == [3, 4, 5]
    assert any(path.stat().st_size for path in folder.rglob("*.xplane.pb"))
    [event] = read_events(tmp_path)
    assert (event["kind"], event["first_step"], event["step"]) == ("profiled", 3, 5)
    assert event["directory"] == str(folder)


def test_a_signal_traces_the_next_steps(tmp_path, profile):
    hook = profile()
    run(hook, steps=2, and_end=False)
    os.kill(os.getpid(), signal.SIGUSR2)
    run(hook, first=3, steps=15)
    assert marked_steps(tmp_path / "profile" / "from_step_4") == list(range(4, 14))


def test_two_traces_are_two(tmp_path, profile):
    hook = profile(steps=range(2, 3))
    run(hook, steps=3, and_end=False)
    hook.request(2)
    run(hook, first=4, steps=4)
    folders = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert folders == ["from_step_2", "from_step_5"]


def test_a_run_that_ends_inside_a_trace_ends_it(tmp_path, profile):
    run(profile(steps=range(3, 100)), steps=4)
    # What comes after the last step is marked as the next one.
    assert marked_steps(tmp_path / "profile" / "from_step_3") == [3, 4, 5]


def test_a_run_that_fails_inside_a_trace_leaves_none_open(tmp_path, profile):
    hook = profile(steps=range(2, 100))
    run(hook, steps=3, and_end=False)
    hook.close()
    with jax.profiler.trace(tmp_path / "another"):  # would refuse a second one
        pass


def test_training_goes_on_where_a_trace_cannot_begin(tmp_path, profile, caplog):
    with jax.profiler.trace(tmp_path / "another"), caplog.at_level(logging.WARNING):
        run(profile(steps=range(2, 4), events=EventLog(tmp_path)), steps=5)
    assert "no profile from step 2 on" in caplog.text
    assert read_events(tmp_path) == []


def test_closing_gives_the_signal_back(profile):
    profile().close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_a_signal_that_somebody_listens_to_is_left_alone(profile):
    def theirs(*_):
        pass

    signal.signal(signal.SIGUSR2, theirs)
    try:
        profile().close()
        assert signal.getsignal(signal.SIGUSR2) is theirs
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_another_thread_may_make_one_and_gets_no_signal(profile):
    thread = threading.Thread(target=profile)
    thread.start()
    thread.join(60)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
