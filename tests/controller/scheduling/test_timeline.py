"""When ops ran, from the ends that islands report."""

import pytest

from replicator.controller.future import ClientRecord
from replicator.controller.scheduling.called_run import CalledRun
from replicator.controller.scheduling.planned import PlannedOp
from replicator.controller.scheduling.timeline import OpTimes
from tests.fakes import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def times(clock):
    return OpTimes(clock)


def run():
    return CalledRun(
        dataflow="f",
        client=ClientRecord(0, "main"),
        plan=None,
        keys={},
        values={},
        results={},
        taken={},
    )


def op(*, is_host=False):
    return PlannedOp(
        name="op", island="island0", places=(0,), inputs=(), is_host=is_host
    )


def test_ops_that_are_reported_together_have_the_times_at_which_they_ended(
    clock, times
):
    called = run()
    clock.advance(10.0)
    assert [times.ended(called, op(), [n], 4.0 - 3.0 * n) for n in (0, 1)] == [6.0, 3.0]
    spans = [(span.begin_s, span.end_s) for span in times.timeline().spans]
    assert spans == [(0.0, 6.0), (6.0, 9.0)]


def test_a_function_of_the_host_takes_no_time_of_devices(clock, times):
    called = run()
    clock.advance(2.0)
    assert times.ended(called, op(is_host=True), [0], 0.0) == 0.0
    assert times.ended(called, op(), [1], 0.0) == 2.0
    rows = [(span.is_host, span.begin_s) for span in times.timeline().spans]
    assert rows == [(True, 0.0), (False, 0.0)]
    assert "island0:0 host" in times.timeline().to_svg()
