"""Lines of arrows: from side to side, beside a column, and below boxes in their way.

Arrows that meet at a side are spread over it, in the order of their other ends, so that
two that run to and fro are two lines.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from replicator.monitoring.drawing.arrows import Arrow, End
from replicator.monitoring.drawing.boxes import Box
from replicator.monitoring.drawing.layers import Point

_HEAD = 7.0
_LOOP = 24.0
_BESIDE = 40.0
"""Ends closer than this are of boxes below each other, on the same side."""
_POINTS = 32
"""Number of points of each part of a line."""
_ENDS_USE = 0.7
"""Part of a side that arrows use."""
_BELOW = 16.0
"""Distance of lanes, for arrows that pass columns, from boxes and each other."""
Lane: TypeAlias = tuple[float, float, float]
"""Left end, right end, and y."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArrowLine:
    """A line as an SVG path, and the place of its caption.

    Attributes:
      path: "M x y C ...".
      points: Points on it, close together.
      caption: Middle of the baseline of its caption; `captions.py` finds it.
      right: Largest x of it.
      bottom: Largest y of it.
    """

    path: str
    points: Sequence[Point]
    caption: Point
    right: float
    bottom: float


def curves_of(arrows: Sequence[Arrow], boxes: Mapping[End, Box]) -> list[ArrowLine]:
    """Return the line of each arrow.

    Args:
      arrows: Arrows of the picture.
      boxes: Boxes of their ends, and of each whole group.
    """
    groups = {end.label: box for end, box in boxes.items() if end.name is None}
    lanes: list[Lane] = []
    lane_of = {
        pair: _lane(groups[pair[0]], groups[pair[1]], groups.values(), lanes)
        for pair in dict.fromkeys((a.source.label, a.target.label) for a in arrows)
    }
    ways = [lane_of[arrow.source.label, arrow.target.label] for arrow in arrows]
    ends = _ends(arrows, boxes, ways)
    return [
        _curve([ends[number, True], *ways[number], ends[number, False]])
        for number in range(len(arrows))
    ]


def _lane(
    source: Box, target: Box, groups: Iterable[Box], lanes: list[Lane]
) -> list[Point]:
    """Return the ends of a new lane below the groups between two, if there are any."""
    left, right = sorted((source, target), key=lambda box: box.x)
    passed = [box for box in groups if left.right < box.x and box.right < right.x]
    if not passed:
        return []
    begin, end = min(box.x for box in passed), max(box.right for box in passed)
    y = max(box.bottom for box in passed) + _BELOW
    while any(
        abs(y - other) < _BELOW and a <= end and begin <= b for a, b, other in lanes
    ):
        y += _BELOW
    lanes.append((begin, end, y))
    points = [(begin, y), (end, y)]
    return points if left is source else points[::-1]


def _ends(
    arrows: Sequence[Arrow],
    boxes: Mapping[End, Box],
    ways: Sequence[Sequence[Point]],
) -> dict[tuple[int, bool], Point]:
    """Return the point where each arrow begins (True) and ends (False)."""
    at_side: dict[tuple[End, bool], list[tuple[float, int, bool]]] = {}
    for number, arrow in enumerate(arrows):
        source, target = boxes[arrow.source], boxes[arrow.target]
        way = ways[number]
        # Between boxes below each other it runs along their right.
        from_right = source.x < target.right
        to_right = target.x < source.right
        # At either end, the y that the arrow comes from.
        first = way[0][1] if way else target.middle
        last = way[-1][1] if way else source.middle
        at_side.setdefault((arrow.source, from_right), []).append((first, number, True))
        at_side.setdefault((arrow.target, to_right), []).append((last, number, False))
    ends: dict[tuple[int, bool], Point] = {}
    for (end, is_right), arriving in at_side.items():
        box = boxes[end]
        used = box.height * _ENDS_USE
        for place, (_, number, is_source) in enumerate(sorted(arriving)):
            y = box.middle + used * ((place + 0.5) / len(arriving) - 0.5)
            ends[number, is_source] = (box.right if is_right else box.x), y
    return ends


def _curve(points: Sequence[Point]) -> ArrowLine:
    x = points[0][0]
    # It ends where its head begins to narrow.
    before, (last_x, last_y) = points[-2], points[-1]
    comes_from_left = last_x > before[0] + _BESIDE / 2
    points = [*points[:-1], (last_x + (-_HEAD if comes_from_left else _HEAD), last_y)]
    is_beside = len(points) == 2 and abs(points[1][0] - x) <= _BESIDE
    right = max(x for x, _ in points)
    parts, on_it = [f"M{_written(points[0])}"], [points[0]]
    for a, b in itertools.pairwise(points):
        bend = (a[0] + b[0]) / 2
        if is_beside:
            bend = right = right + _LOOP + min(abs(a[1] - b[1]) / 4, _LOOP)
        controls = (bend, a[1]), (bend, b[1]), b
        parts.append("C" + " ".join(map(_written, controls)))
        on_it += _bezier(a, bend, b)
    return ArrowLine(
        path=" ".join(parts),
        points=on_it,
        caption=on_it[len(on_it) // 2],
        right=right,
        bottom=max(y for _, y in points),
    )


def _bezier(a: Point, bend: float, b: Point) -> list[Point]:
    """Return points of a Bézier curve from a to b, with horizontal tangents."""
    found = []
    for step in range(1, _POINTS + 1):
        t = step / _POINTS
        near, far = (1 - t) ** 2 * (1 + 2 * t), t**2 * (3 - 2 * t)
        x = (1 - t) ** 3 * a[0] + 3 * t * (1 - t) * bend + t**3 * b[0]
        found.append((x, near * a[1] + far * b[1]))
    return found


def _written(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
