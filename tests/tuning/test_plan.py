"""What a plan makes of outcomes: what fits, what is best, what to change."""

import json

import pytest

from replicator import Replicator
from replicator.errors import ArgumentError
from replicator.strategies import Machine
from replicator.tuning import plan
from replicator.tuning.named import named_strategies
from replicator.tuning.problem import ProblemFile
from tests.tuning import problems
from tests.tuning.rows import GIB, row


def test_what_the_compiler_took_fits_whatever_the_sum_of_parts_is():
    assert row(needs=17).fits is True


@pytest.mark.parametrize(
    ("given", "fits", "excess"),
    [
        ({"status": "memory", "needs": 18}, False, 2 * GIB),
        ({"status": "forecast", "state": 20}, False, 4 * GIB),
        ({"status": "forecast", "state": 3}, None, 0),
        ({"status": "timeout"}, None, None),
    ],
)
def test_what_fits_and_by_how_much(given, fits, excess):
    found = row(**given)
    assert (found.fits, found.excess_bytes) == (fits, excess)


def test_the_best_is_the_fastest_that_fits():
    slow, fast = row("fsdp"), row("zero1", wire=10**6)
    huge = row("data_parallel", status="memory", needs=20)
    assert plan.best_of([huge, slow, fast]) is fast
    assert plan.best_of([huge]) is None


def test_the_nearest_lacks_the_least():
    near, far = row(status="memory", needs=17), row(status="memory", needs=30)
    assert plan.nearest_of([far, near, row()]) is near


def test_a_device_is_compared_with_one_of_the_smallest_topology():
    small, large = row(topology="v5e:4x4"), row(topology="v5e:16x16")
    first, later = plan.efficiencies([large, small])
    assert later == 1
    assert first == pytest.approx(small.time.high_s / large.time.high_s / 16)


def test_advice_names_what_fits_and_how_many_examples():
    huge = row("zero1", status="memory", state=2, needs=30, limit=16)
    said = plan.advice(huge, [huge, row("fsdp")])
    assert "take fsdp, which fits" in said
    assert "take about 512 examples instead of 1,024, or `accumulate=2`" in said


def test_advice_names_what_may_fit_where_nothing_was_compiled():
    huge = row("zero1", status="forecast", state=20)
    said = plan.advice(huge, [huge, row("fsdp", status="forecast")])
    assert said == "take fsdp, whose state fits"


def test_a_state_that_does_not_fit_needs_more_devices():
    huge = row(status="memory", state=20, needs=30, limit=16)
    assert plan.advice(huge, [huge]).startswith("take more devices")


def test_a_row_is_plain_data():
    plain = json.loads(json.dumps(row().as_json()))
    assert (plain["fits"], plain["sent_bytes"]) == (True, {"shard": 10**9})


def test_without_a_compiler_fake_devices_are_as_many():
    machine = Machine.from_topology("h100:2x8")
    assert plan.devices_for("h100:2x8", machine) == "cpu:16"


def planner():
    problem = ProblemFile.from_text(f"{problems.__file__}:problem")
    return plan.Planner(problem, Replicator, plan.PlanOptions())


def test_a_topology_that_does_not_exist_is_refused_before_anything_runs():
    rows = planner().rows(["v5e:4x4", "v5e:5x5"], named_strategies("fsdp"))
    with pytest.raises(ArgumentError, match="Use one of 1x1, 2x2"):
        next(rows)


@pytest.mark.slow
def test_gpus_are_planned_by_forecast():
    zero1 = named_strategies("zero1(whole_below_bytes=0)")
    [found] = planner().rows(["h100:1x2"], zero1)
    assert (found.outcome.status, found.fits) == ("forecast", None)
    assert found.time.arithmetic_s > 0
    assert found.sent_bytes["shard"] > 0
