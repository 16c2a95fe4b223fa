"""How arrows run: from side to side, along passages, and beside a column.

Where several arrows meet at a side they stand apart, in the order of where they come
from, so that two that run to and fro are two lines.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from replicator.launchpad_bridge.view.drawing.arrows import Arrow, End
from replicator.launchpad_bridge.view.drawing.boxes import Box
from replicator.launchpad_bridge.view.drawing.layers import Point

_HEAD = 7.0
_LOOP = 24.0
_BESIDE = 20.0
"""Ends that are no further apart stand on the same side, of boxes below each other."""
_ENDS_USE = 0.7
"""How much of a side arrows use."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A line in the words of an SVG path, and where its text may stand.

    Attributes:
      path: "M x y C ...".
      middle: A point on it, about half way.
      right: How far right it runs.
    """

    path: str
    middle: Point
    right: float


def curves_of(
    arrows: Sequence[Arrow],
    boxes: Mapping[End, Box],
    ways: Sequence[Sequence[Point]],
) -> list[Curve]:
    """Return how each arrow runs.

    Args:
      arrows: Of the picture.
      boxes: Where what they join stands.
      ways: What each arrow passes.
    """
    ends = _ends(arrows, boxes, ways)
    return [
        _curve([ends[number, True], *ways[number], ends[number, False]])
        for number in range(len(arrows))
    ]


def _ends(
    arrows: Sequence[Arrow],
    boxes: Mapping[End, Box],
    ways: Sequence[Sequence[Point]],
) -> dict[tuple[int, bool], Point]:
    """Return where each arrow begins (True) and ends (False)."""
    at_side: dict[tuple[End, bool], list[tuple[float, int, bool]]] = {}
    for number, arrow in enumerate(arrows):
        source, target = boxes[arrow.source], boxes[arrow.target]
        way = ways[number]
        # Between boxes below each other it runs along their right.
        from_right = source.x < target.right
        to_right = target.x < source.right
        # At either end, how far up or down the arrow comes from.
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


def _curve(points: Sequence[Point]) -> Curve:
    # Between two columns: beside a passage there are boxes.
    gap = (len(points) - 2) // 4 * 2
    middle = _middle(points[gap], points[gap + 1])
    points = _without_head(points)
    # Around boxes below each other: a quarter of the way to its handles is missing.
    loops = [
        edge + 0.75 * (_outside(a, b) - edge)
        for a, b in list(itertools.pairwise(points))[::2]
        if _is_beside(a, b)
        for edge in [max(a[0], b[0])]
    ]
    right = max([x for x, _ in points] + loops)
    return Curve(path=" ".join(_pieces(points)), middle=middle, right=right)


def _without_head(points: Sequence[Point]) -> list[Point]:
    """Return a line that ends where the head drawn at its end begins to narrow."""
    (last_x, last_y), before = points[-1], points[-2]
    comes_from_left = last_x > before[0] + _BESIDE
    return [*points[:-1], (last_x + (-_HEAD if comes_from_left else _HEAD), last_y)]


def _is_beside(a: Point, b: Point) -> bool:
    return abs(b[0] - a[0]) <= 2 * _BESIDE


def _outside(a: Point, b: Point) -> float:
    """Return where the handles of a line between boxes below each other are."""
    return max(a[0], b[0]) + _LOOP + min(abs(a[1] - b[1]) / 4, _LOOP)


def _pieces(points: Sequence[Point]) -> Iterator[str]:
    """Yield level beginnings and ends, joined by curves."""
    yield f"M{_told(points[0])}"
    for index, (a, b) in enumerate(itertools.pairwise(points)):
        if index % 2:  # along a passage
            yield f"L{_told(b)}"
            continue
        bend = (b[0] - a[0]) / 2
        out, back = a[0] + bend, b[0] - bend
        if _is_beside(a, b):
            out = back = _outside(a, b)
        yield f"C{_told((out, a[1]))} {_told((back, b[1]))} {_told(b)}"


def _middle(a: Point, b: Point) -> Point:
    return (a[0] + b[0]) / 2, (a[1] + b[1]) / 2


def _told(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
