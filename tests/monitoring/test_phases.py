"""What a run is doing: all seconds are counted once, and add up."""

import threading

import pytest

from replicator.monitoring.phases import PHASES, Phases
from tests.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


def test_a_phase_lasts_until_the_next(clock):
    phases = Phases(clock)
    clock.advance(2)
    phases.enter("step", step=1)
    clock.advance(3)
    assert phases.seconds() == dict.fromkeys(PHASES, 0.0) | {"start": 2, "step": 3}


def test_a_phase_inside_another_is_counted_apart(clock):
    phases = Phases(clock)
    phases.enter("step")
    clock.advance(1)
    with phases.during("compile"):
        clock.advance(5)
    clock.advance(1)
    assert phases.seconds() == dict.fromkeys(PHASES, 0.0) | {"step": 2, "compile": 5}


def test_a_phase_that_comes_again_goes_on(clock):
    phases = Phases(clock)
    for phase in ("step", "input", "step"):
        phases.enter(phase)
        clock.advance(1)
    assert phases.seconds()["step"] == 2


def test_what_devices_did_not_wait_for_counts_as_their_step(clock):
    phases = Phases(clock)
    for hidden in (True, False):
        phases.enter("input")
        clock.advance(2)
        phases.enter("step", hidden=hidden)
        clock.advance(3)
    phases.enter("report", hidden=True)
    assert phases.seconds() == dict.fromkeys(PHASES, 0.0) | {"step": 8, "input": 2}


def test_the_current_phase_tells_its_step_and_its_beginning(clock):
    phases = Phases(clock)
    clock.advance(4)
    phases.enter("step", step=7)
    with phases.during("save"):
        pass
    found = phases.current
    assert (found.phase, found.since_s, found.step) == ("step", 4, 7)


def test_a_failure_inside_a_phase_leaves_it(clock):
    phases = Phases(clock)
    with pytest.raises(OSError, match="full"), phases.during("save"):
        raise OSError("full")
    assert phases.current.phase == "start"


def test_another_thread_never_counts_a_second_twice(clock):
    phases, most = Phases(clock), []
    done = threading.Event()

    def read():
        while not done.is_set():
            most.append(sum(phases.seconds().values()))

    reader = threading.Thread(target=read)
    reader.start()
    clock.advance(1)
    for _ in range(20_000):
        phases.enter("step")
        phases.enter("input")
    done.set()
    reader.join()
    assert max(most) <= 1
