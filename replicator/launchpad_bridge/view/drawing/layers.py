"""Place boxes in columns so that links go from left to right.

    1  a column for each box: right of all that link to it, a circle cut somewhere
    2  a point in each column that a link passes on its way
    3  order the columns, forth and back, by the mean place of neighbours

Pure: sizes and links in, places out.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Link: TypeAlias = tuple[int, int]
_SWEEPS = 4
_BETWEEN_BOXES = 18.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Where things are; (0, 0) is top left.

    Attributes:
      corners: The top left corner of each box.
      columns: The column of each box.
      passages: For each link, from its source on, the ends of what it runs along
        where it passes a column: two points each.
      width: Of all.
      height: Of all.
    """

    corners: Sequence[Point]
    columns: Sequence[int]
    passages: Sequence[Sequence[Point]]
    width: float
    height: float


def place(
    sizes: Sequence[Point], links: Sequence[Link], *, between_columns: float = 72.0
) -> Placed:
    """Place boxes.

    Args:
      sizes: Width and height of each box.
      links: Pairs of two different boxes; the same pair may come again.
      between_columns: How far columns stand apart, in pixels.
    """
    columns = _columns(len(sizes), links)
    ranks = list(columns)
    chains = []
    for source, target in links:
        left, right = sorted((source, target), key=columns.__getitem__)
        passed = range(columns[left] + 1, columns[right])
        chains.append([left, *range(len(ranks), len(ranks) + len(passed)), right])
        ranks += passed
    heights = [height for _, height in sizes] + [0.0] * (len(ranks) - len(sizes))
    layers = _ordered(ranks, chains)
    middles = _middles(layers, heights)
    widths = [max(sizes[i][0] for i in items if i < len(sizes)) for items in layers]
    lefts = [0.0, *itertools.accumulate(width + between_columns for width in widths)]
    passages = []
    for chain, (source, _) in zip(chains, links, strict=True):
        points: list[Point] = []
        for item in chain[1:-1]:
            left, y = lefts[ranks[item]], middles[item]
            points += [(left, y), (left + widths[ranks[item]], y)]
        passages.append(points if chain[0] == source else points[::-1])
    return Placed(
        corners=[
            (lefts[column] + (widths[column] - width) / 2, middle - height / 2)
            for (width, height), column, middle in zip(
                sizes, columns, middles[: len(sizes)], strict=True
            )
        ],
        columns=columns,
        passages=passages,
        width=max(0.0, lefts[-1] - between_columns),
        height=max(
            (m + h / 2 for m, h in zip(middles, heights, strict=True)), default=0
        ),
    )


def _columns(count: int, links: Sequence[Link]) -> list[int]:
    """Return a column for each box: sources stand next to what they link to."""
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
    _fill_up(columns, [box for box in range(count) if not after[box] | before[box]])
    return [columns[box] for box in range(count)]


def _fill_up(columns: dict[int, int], alone: Sequence[int]) -> None:
    """Put boxes without links where columns have the fewest; alone, in a square."""
    for box in alone:
        del columns[box]
    fewest = [0] * (max(columns.values(), default=-1) + 1 or math.isqrt(len(alone)))
    for column in columns.values():
        fewest[column] += 1
    for box in alone:
        columns[box] = fewest.index(min(fewest))
        fewest[columns[box]] += 1


def _ordered(ranks: Sequence[int], chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the boxes and passages of each column, from the top."""
    layers: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for item, rank in enumerate(ranks):
        layers[rank].append(item)
    near: list[list[int]] = [[] for _ in ranks]
    for left, right in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
        near[left].append(right)
        near[right].append(left)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        places: dict[int, float] = {}
        for layer in layers if forth else reversed(layers):
            wanted = {}
            for number, item in enumerate(layer):
                known = [places[other] for other in near[item] if other in places]
                wanted[item] = statistics.fmean(known or [number - len(layer) / 2])
            layer.sort(key=wanted.__getitem__)
            places |= {item: i - len(layer) / 2 for i, item in enumerate(layer)}
    return layers


def _middles(layers: Sequence[Sequence[int]], heights: Sequence[float]) -> list[float]:
    """Return the middle of each box and passage; all columns have one middle."""
    middles = [0.0] * len(heights)
    tallest = max((_height(layer, heights) for layer in layers), default=0.0)
    for layer in layers:
        top = (tallest - _height(layer, heights)) / 2
        for item in layer:
            middles[item] = top + heights[item] / 2
            top += heights[item] + _BETWEEN_BOXES
    return middles


def _height(layer: Sequence[int], heights: Sequence[float]) -> float:
    return sum(heights[item] + _BETWEEN_BOXES for item in layer) - _BETWEEN_BOXES
