import numpy as np
import pytest

from benchmarks.step.run_against import OURS, time_run_against
from benchmarks.timing import estimate, ratio, seconds, time_rounds


class WorkClock:
    """A clock that moves only when somebody works."""

    def __init__(self):
        self.time_s = 0.0

    def now_s(self):
        return self.time_s

    def work(self, time_s):
        self.time_s += time_s


def test_estimate_of_equal_rounds_is_that_number():
    found = estimate([2.0] * 10)
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_median_ignores_a_disturbed_round():
    assert estimate([1.0, 1.0, 1.0, 1.0, 50.0]).median == 1.0


def test_bounds_contain_the_median_and_tighten_with_more_rounds():
    rng = np.random.default_rng(1)
    few, many = estimate(rng.normal(1, 0.1, 30)), estimate(rng.normal(1, 0.1, 3000))
    assert few.low < few.median < few.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_bounds_are_wrong_in_one_experiment_of_twenty_on_each_side():
    rng = np.random.default_rng(2)
    found = [estimate(rng.normal(1, 0.1, 40)) for _ in range(200)]
    too_high = np.mean([each.low > 1 for each in found])
    too_low = np.mean([each.high < 1 for each in found])
    # 5 % of 200 is 10, with a standard deviation of 3.1: four of them above.
    assert 0 < too_high < 0.115
    assert 0 < too_low < 0.115


def test_ratio_pairs_the_rounds_so_that_drift_cancels():
    drift = np.linspace(1, 9, 20)
    assert ratio(1.5 * drift, drift).low == pytest.approx(1.5)


def test_seconds_is_what_the_clock_passed():
    clock = WorkClock()
    assert seconds(lambda: clock.work(3.0), clock) == 3.0


def test_rounds_take_turns_and_leave_out_the_warm_up():
    clock, turns = WorkClock(), []

    def block(name, time_s):
        turns.append(name)
        clock.work(time_s if turns.count(name) > 1 else 100.0)

    times_s = time_rounds(
        {"a": lambda: block("a", 1.0), "b": lambda: block("b", 2.0)},
        rounds=2,
        clock=clock,
    )
    assert turns == ["a", "b"] * 3
    assert times_s == {"a": [1.0, 1.0], "b": [2.0, 2.0]}


def test_run_is_timed_between_its_blocks_and_not_while_others_work(event):
    clock = WorkClock()

    def run(hook):
        for step in range(1, 7):
            clock.work(100.0 if step == 1 else 1.0)
            hook.on_state(event(step))

    times_s = time_run_against(
        run, {"other": lambda: clock.work(7.0)}, steps_per_block=2, clock=clock
    )
    assert times_s == {OURS: [2.0, 2.0], "other": [7.0, 7.0]}


@pytest.fixture
def event():
    from replicator.hooks import StateEvent
    from replicator.monitoring.progress import Progress

    def make(step):
        progress = Progress(WorkClock(), steps=None)
        numbers = progress.update(step=step, examples=step, stall_s=0.0)
        return StateEvent(
            step=step, advanced=1, examples=step, progress=numbers, read_state=tuple
        )

    return make
