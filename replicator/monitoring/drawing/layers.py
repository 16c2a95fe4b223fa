"""Place boxes in columns so that links go from left to right.

    1  a column for each box: right of all that link to it, a circle cut somewhere
    2  order the columns, forth and back, by the mean place of neighbours

Pure: sizes and links in, places out.
"""

import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Link: TypeAlias = tuple[int, int]
_SWEEPS = 4
_BETWEEN_BOXES = 18.0


def place(
    sizes: Sequence[Point], links: Sequence[Link], *, between_columns: float = 72.0
) -> list[Point]:
    """Return the top left corner of each box; all columns have one middle.

    Args:
      sizes: Width and height of each box.
      links: Pairs of two different boxes; the same pair may come again.
      between_columns: Distance between columns, in pixels.

    >>> place([(80, 20), (80, 20)], [(0, 1)])
    [(0.0, 0.0), (152.0, 0.0)]
    """
    layers = _ordered(_columns(len(sizes), links), links)
    heights = [
        sum(sizes[box][1] + _BETWEEN_BOXES for box in layer) - _BETWEEN_BOXES
        for layer in layers
    ]
    corners = [(0.0, 0.0)] * len(sizes)
    left = 0.0
    for layer, height in zip(layers, heights, strict=True):
        widest = max(sizes[box][0] for box in layer)
        top = (max(heights) - height) / 2
        for box in layer:
            corners[box] = (left + (widest - sizes[box][0]) / 2, top)
            top += sizes[box][1] + _BETWEEN_BOXES
        left += widest + between_columns
    return corners


def _columns(count: int, links: Sequence[Link]) -> list[int]:
    """Return a column for each box: sources are next to the targets of their links."""
    before: list[set[int]] = [set() for _ in range(count)]
    after: list[set[int]] = [set() for _ in range(count)]
    for source, target in links:
        before[target].add(source)
        after[source].add(target)
    columns: dict[int, int] = {}
    while len(columns) < count:
        left = [box for box in range(count) if box not in columns]
        ready = [box for box in left if before[box] <= columns.keys()]
        if not ready:  # a circle is cut where it is entered
            ready = [max(left, key=lambda box: bool(before[box] & columns.keys()))]
        for box in ready:
            known = [columns[source] for source in before[box] if source in columns]
            columns[box] = max(known, default=-1) + 1
    for box in range(count):
        if after[box] and not before[box]:
            columns[box] = min(columns[target] for target in after[box]) - 1
    # Those without links go to the right, where there are few; all alone, in a square.
    alone = [box for box in range(count) if not after[box] | before[box]]
    wide = max(columns.values(), default=0) + 1 if links else math.isqrt(count)
    for place, box in enumerate(alone):
        columns[box] = wide - 1 - place % wide
    return [columns[box] for box in range(count)]


def _ordered(columns: Sequence[int], links: Sequence[Link]) -> list[list[int]]:
    """Return the boxes of each column, from the top."""
    layers: list[list[int]] = [[] for _ in range(max(columns, default=-1) + 1)]
    for box, column in enumerate(columns):
        layers[column].append(box)
    near: list[list[int]] = [[] for _ in columns]
    for source, target in links:
        near[source].append(target)
        near[target].append(source)
    for sweep in range(_SWEEPS):
        places: dict[int, float] = {}
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = {}
            for number, box in enumerate(layer):
                known = [places[other] for other in near[box] if other in places]
                wanted[box] = statistics.fmean(known or [number - len(layer) / 2])
            layer.sort(key=wanted.__getitem__)
            places |= {box: i - len(layer) / 2 for i, box in enumerate(layer)}
    return layers
