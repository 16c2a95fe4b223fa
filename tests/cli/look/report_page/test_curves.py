"""Curves keep their extremes and gaps, know their time, and come in groups."""

import math

from replicator.cli.look.report_page.curves import (
    group_curves,
    make_curves,
    process_starts,
    thin,
    training_s,
)
from replicator.cli.look.report_page.run_files import MetricRow


def row(step, time_s, **numbers):
    return MetricRow(step=step, time_s=time_s, numbers=numbers)


def test_thinning_keeps_the_least_the_greatest_the_ends_and_gaps():
    values = [math.sin(index / 50) for index in range(20_000)]
    values[7_001], values[7_002], values[15_000] = 90.0, -90.0, None
    chosen = thin(values, most=500)
    assert {0, 7_001, 7_002, 15_000, 19_999} <= set(chosen)
    assert len(chosen) < 1_000
    assert chosen == sorted(set(chosen))


def test_few_points_stay_as_they_are():
    assert thin([3.0, None, 1.0]) == [0, 1, 2]


def test_a_number_that_is_not_finite_is_a_gap_and_is_told():
    [curve] = make_curves([row(1, 0, a=1.0), row(2, 1, a=math.nan)], {})
    assert curve.line.values == [1.0, None]
    assert curve.bad_steps == [2]
    assert (curve.least, curve.greatest) == (1.0, 1.0)


def test_a_metric_that_is_nowhere_finite_has_a_curve_all_the_same():
    [curve] = make_curves([row(1, 0, a=math.inf)], {})
    assert math.isnan(curve.least)
    assert curve.last == math.inf


def test_time_goes_on_where_another_process_does():
    rows = [row(1, 0.0), row(2, 10.0), row(3, 2.0), row(4, 3.0)]
    assert training_s(rows) == [0.0, 10.0, 12.0, 13.0]
    assert process_starts(rows) == [3]


def test_writers_of_one_process_are_no_two_processes():
    rows = [row(1, 5.0), row(1, 4.998), row(2, 6.0)]
    assert training_s(rows) == [5.0, 5.0, 6.0]
    assert process_starts(rows) == []


def test_groups_begin_with_plain_names_and_losses_and_end_with_the_run_itself():
    numbers = {"progress/a": 1.0, "eval/b": 1.0, "acc": 1.0, "loss": 1.0}
    groups = group_curves(make_curves([row(1, 0, **numbers)], {}))
    assert list(groups) == ["", "eval", "progress"]
    assert [curve.name for curve in groups[""]] == ["loss", "acc"]


def test_earlier_runs_are_lines_of_the_same_curve():
    [curve] = make_curves([row(1, 0, a=1.0)], {"earlier/0": [row(1, 0, a=2.0)]})
    assert [line.values for line in curve.earlier] == [[2.0]]
