"""Turn rows of metrics into curves that are small enough to draw.

A curve keeps the least and the greatest of each stretch of steps, so that no spike is
lost: every n-th point alone would lose them, and a mean would shrink them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from replicator.cli.look.report_page.run_files import MetricRow

_MOST_POINTS, _MOST_EARLIER_POINTS = 500, 150
_MOST_EARLIER = 5
# Groups of numbers about the run itself, in the order in which they are shown.
ABOUT_THE_RUN = ("progress", "memory", "compile", "program", "goodput")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points of one metric in one run, in order.

    Attributes:
      steps: Step of each point.
      seconds: Training time until each point, time between processes left out.
      values: Value of each point; None if it is not finite: the line breaks there.
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    values: Sequence[float | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MetricCurve:
    """One metric over a run.

    Attributes:
      name: Name of the metric.
      line: Line of the present run.
      earlier: Lines of the runs before it, the newest first.
      last: Its last value.
      least: Its least finite value; NaN if there is none.
      greatest: Its greatest finite value, likewise.
      bad_steps: Steps at which it was not finite.
    """

    name: str
    line: Line
    earlier: Sequence[Line]
    last: float
    least: float
    greatest: float
    bad_steps: Sequence[int]


def make_curves(
    rows: Sequence[MetricRow], earlier: Mapping[str, Sequence[MetricRow]]
) -> list[MetricCurve]:
    """Return one curve for each metric of the present run, in the order of first use.

    Args:
      rows: Rows of the present run.
      earlier: Rows of runs before it, oldest first; the newest few are drawn, too.
    """
    names = dict.fromkeys(name for row in rows for name in row.numbers)
    seconds = training_s(rows)
    before = [(old, training_s(old)) for old in earlier.values()][-_MOST_EARLIER:]
    return [
        _curve(
            name,
            rows,
            seconds,
            [_line(name, *old, _MOST_EARLIER_POINTS) for old in reversed(before)],
        )
        for name in names
    ]


def group_curves(curves: Sequence[MetricCurve]) -> dict[str, list[MetricCurve]]:
    """Sort curves by what comes before the `/` of their names; the plain ones first.

    Rates and other numbers about the run itself come last.
    """
    groups: dict[str, list[MetricCurve]] = {}
    for curve in curves:
        prefix = curve.name.rpartition("/")[0]
        groups.setdefault(prefix, []).append(curve)
    order = sorted(groups, key=_place)
    return {prefix: sorted(groups[prefix], key=_losses_first) for prefix in order}


def _place(prefix: str) -> int:
    return 1 + ABOUT_THE_RUN.index(prefix) if prefix in ABOUT_THE_RUN else -(not prefix)


def _losses_first(curve: MetricCurve) -> bool:
    return "loss" not in curve.name


def training_s(rows: Sequence[MetricRow]) -> list[float]:
    """Return for each row the training time until then, in seconds.

    Each process starts its clock anew: if the clock goes back, another process goes on.
    """
    before_s, last_s, seconds = 0.0, 0.0, []
    for row in rows:
        now_s = row.time_s if math.isfinite(row.time_s) else last_s
        if _starts_anew(last_s, now_s):
            before_s, last_s = before_s + last_s, 0.0
        last_s = max(last_s, now_s)
        seconds.append(before_s + last_s)
    return seconds


def process_starts(rows: Sequence[MetricRow]) -> list[int]:
    """Return the steps at which another process went on: its first rows."""
    return [
        row.step
        for before, row in pairwise(rows)
        if _starts_anew(before.time_s, row.time_s)
    ]


def _starts_anew(before_s: float, now_s: float) -> bool:
    # Several writers of one process were not opened in the same millisecond.
    return now_s < before_s - 1.0


def thin(values: Sequence[float | None], most: int = _MOST_POINTS) -> list[int]:
    """Choose which points to draw.

    Args:
      values: Values in order; None breaks the line.
      most: About how many to choose.

    Returns:
      Their indices: of each stretch the least, the greatest and any break.

    >>> thin([0.0, 1.0, None, 2.0])
    [0, 1, 2, 3]
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretch = math.ceil(2 * len(values) / most)
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        part = range(start, min(start + stretch, len(values)))
        finite = [(values[index], index) for index in part if values[index] is not None]
        if finite:
            chosen |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(part):
            chosen.add(next(index for index in part if values[index] is None))
    return sorted(chosen)


def _curve(
    name: str,
    rows: Sequence[MetricRow],
    seconds: Sequence[float],
    earlier: Sequence[Line],
) -> MetricCurve:
    found = [(row.step, row.numbers[name]) for row in rows if name in row.numbers]
    finite = [value for _, value in found if math.isfinite(value)]
    return MetricCurve(
        name=name,
        line=_line(name, rows, seconds),
        earlier=[line for line in earlier if line.steps],
        last=found[-1][1],
        least=min(finite, default=math.nan),
        greatest=max(finite, default=math.nan),
        bad_steps=[step for step, value in found if not math.isfinite(value)],
    )


def _line(
    name: str,
    rows: Sequence[MetricRow],
    seconds: Sequence[float],
    most: int = _MOST_POINTS,
) -> Line:
    there = [index for index, row in enumerate(rows) if name in row.numbers]
    values = [_finite(rows[index].numbers[name]) for index in there]
    chosen = thin(values, most)
    return Line(
        steps=[rows[there[point]].step for point in chosen],
        seconds=[round(seconds[there[point]], 3) for point in chosen],
        values=[values[point] for point in chosen],
    )


def _finite(value: float) -> float | None:
    # Seven digits are what a float32 holds.
    return float(f"{value:.7g}") if math.isfinite(value) else None
