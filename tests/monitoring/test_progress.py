"""Progress: counts and a fake clock in, rates out."""

import pytest

from replicator.monitoring.progress import Progress
from tests.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock(now_s=1000.0)


def updates(progress, clock, *, steps, seconds_each, first=1, examples=32):
    numbers = None
    for step in range(first, first + steps):
        clock.advance(seconds_each)
        numbers = progress.update(step=step, examples=step * examples, stall_s=0.0)
    return numbers


def test_the_first_call_is_compile_time_and_in_no_rate(clock):
    progress = Progress(clock, steps=10)
    clock.advance(60.0)
    first = progress.update(step=1, examples=32, stall_s=2.0)
    assert (first.compile_s, first.elapsed_s) == (58.0, 60.0)
    assert first.steps_per_s is first.examples_per_s is first.eta_s is None
    assert first.input_stall_share is None
    later = updates(progress, clock, steps=4, seconds_each=0.5, first=2)
    assert later.steps_per_s == pytest.approx(2.0)
    assert later.compile_s == 58.0


def test_rates_and_time_left(clock):
    progress = Progress(clock, steps=1000)
    numbers = updates(progress, clock, steps=101, seconds_each=0.125)
    assert numbers.steps_per_s == pytest.approx(8.0)
    assert numbers.examples_per_s == pytest.approx(256.0)
    assert numbers.eta_s == pytest.approx(899 / 8)
    assert (numbers.step, numbers.steps) == (101, 1000)


def test_rates_forget_what_left_the_window(clock):
    progress = Progress(clock, steps=None, window_s=30.0)
    updates(progress, clock, steps=100, seconds_each=1.0)
    numbers = updates(progress, clock, steps=320, seconds_each=0.1, first=101)
    assert numbers.steps_per_s == pytest.approx(10.0)


def test_a_window_remembers_few_counts(clock):
    progress = Progress(clock, steps=None, window_s=30.0)
    updates(progress, clock, steps=10_000, seconds_each=0.01)
    assert len(progress._anchors) <= 62


def test_time_left_is_unknown_without_an_end(clock):
    progress = Progress(clock, steps=None)
    assert updates(progress, clock, steps=5, seconds_each=1.0).eta_s is None


def test_stall_share_is_the_part_of_the_window_that_waited_for_input(clock):
    progress = Progress(clock, steps=None)
    progress.update(step=1, examples=1, stall_s=5.0)
    clock.advance(10.0)
    assert progress.update(step=2, examples=2, stall_s=7.5).input_stall_share == 0.25


def test_a_resumed_run_does_not_count_the_steps_before_it(clock):
    progress = Progress(clock, steps=600)
    numbers = updates(progress, clock, steps=11, seconds_each=1.0, first=501)
    assert numbers.steps_per_s == pytest.approx(1.0)
    assert numbers.eta_s == pytest.approx(89.0)
