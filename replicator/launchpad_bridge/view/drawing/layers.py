"""Place boxes in columns so that links go from left to right: a layered layout.

The method of Sugiyama, Tagawa and Toda, "Methods for visual understanding of
hierarchical system structures" (1981), small and without randomness:

    1  turn links round until there is no circle
    2  a column for each box: right of all that link to it
    3  a point in each column that a link passes on its way
    4  order the columns, forth and back, by the mean of neighbours; keep the best
    5  move boxes up and down towards their neighbours, in that order, not overlapping

Pure: sizes and links in, places out.
"""

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Link: TypeAlias = tuple[int, int]
_SWEEPS = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spaces:
    """Distances, in pixels.

    Attributes:
      columns: Between two columns.
      boxes: Between two boxes of a column.
      links: Between two links that pass a column.
    """

    columns: float = 72.0
    boxes: float = 18.0
    links: float = 12.0


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
    sizes: Sequence[Point], links: Sequence[Link], spaces: Spaces | None = None
) -> Placed:
    """Place boxes.

    Args:
      sizes: Width and height of each box.
      links: Pairs of two different boxes; the same pair may come again.
      spaces: Distances.
    """
    spaces = spaces or Spaces()
    forward = _forward(len(sizes), links)
    columns = _columns(len(sizes), forward)
    ranks = list(columns)
    chains: list[tuple[Sequence[int], bool]] = []
    parts: list[Link] = []
    for (source, target), link in zip(forward, links, strict=True):
        passed = range(columns[source] + 1, columns[target])
        chain = [source, *range(len(ranks), len(ranks) + len(passed)), target]
        ranks += passed
        chains.append((chain, link[0] != source))
        parts += itertools.pairwise(chain)
    heights = [height for _, height in sizes] + [0.0] * (len(ranks) - len(sizes))
    layers = _ordered(ranks, parts)
    middles = _middles(layers, heights, parts, len(sizes), spaces)
    return _measured(sizes, columns, chains, middles, spaces)


def _forward(count: int, links: Sequence[Link]) -> list[Link]:
    """Return the links, some turned round, such that no circle is left."""
    finished = _finished(count, links)
    return [
        (source, target) if finished[source] > finished[target] else (target, source)
        for source, target in links
    ]


def _finished(count: int, links: Sequence[Link]) -> list[int]:
    """Return when a depth-first search has done with each: the last first."""
    after: list[list[int]] = [[] for _ in range(count)]
    is_called = [False] * count
    for source, target in links:
        after[source].append(target)
        is_called[target] = True
    seen: set[int] = set()
    finished = [0] * count
    clock = 0
    # From those that nobody links to: a circle is cut where it is entered.
    for start in sorted(range(count), key=is_called.__getitem__):
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(after[start]))]
        while stack:
            box, pending = stack[-1]
            new = next((other for other in pending if other not in seen), None)
            if new is None:
                clock += 1
                finished[box] = clock
                stack.pop()
            else:
                seen.add(new)
                stack.append((new, iter(after[new])))
    return finished


def _columns(count: int, links: Sequence[Link]) -> list[int]:
    """Return a column for each box: sources stand next to what they link to."""
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in links:
        before[target].append(source)
        after[source].append(target)
    columns = [0] * count
    waits_for = [len(sources) for sources in before]
    ready = [box for box in range(count) if not waits_for[box]]
    for box in ready:  # grows
        for target in after[box]:
            columns[target] = max(columns[target], columns[box] + 1)
            waits_for[target] -= 1
            if not waits_for[target]:
                ready.append(target)
    for box in range(count):
        if after[box] and not before[box]:
            columns[box] = min(columns[target] for target in after[box]) - 1
    return columns


def _ordered(ranks: Sequence[int], parts: Sequence[Link]) -> list[list[int]]:
    """Return the boxes and passages of each column, in an order with few crossings."""
    layers: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for item, rank in enumerate(ranks):
        layers[rank].append(item)
    lower: list[list[int]] = [[] for _ in ranks]
    upper: list[list[int]] = [[] for _ in ranks]
    for left, right in parts:
        upper[right].append(left)
        lower[left].append(right)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, lower)
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        neighbours = upper if forth else lower
        order = range(1, len(layers)) if forth else range(len(layers) - 2, -1, -1)
        for rank in order:
            fixed = layers[rank - 1 if forth else rank + 1]
            place_of = {item: place for place, item in enumerate(fixed)}
            layers[rank] = _by_neighbours(layers[rank], neighbours, place_of)
        crossings = _crossings(layers, lower)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _by_neighbours(
    layer: Sequence[int], neighbours: Sequence[Sequence[int]], place_of: dict[int, int]
) -> list[int]:
    """Return a column in the order of its neighbours; who has none keeps its place."""
    wanted = {
        item: statistics.fmean(place_of[other] for other in neighbours[item])
        if neighbours[item]
        else float(place)
        for place, item in enumerate(layer)
    }
    return sorted(layer, key=wanted.__getitem__)


def _crossings(layers: Sequence[Sequence[int]], lower: Sequence[Sequence[int]]) -> int:
    """Return how often links between neighbouring columns cross."""
    count = 0
    for left, right in itertools.pairwise(layers):
        place_of = {item: place for place, item in enumerate(right)}
        seen: list[int] = []
        for item in left:
            ends = sorted(place_of[other] for other in lower[item])
            count += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
            for end in ends:
                bisect.insort(seen, end)
    return count


def _middles(
    layers: Sequence[Sequence[int]],
    heights: Sequence[float],
    parts: Sequence[Link],
    boxes: int,
    spaces: Spaces,
) -> list[float]:
    """Return the middle of each box and passage, from the top of the picture."""
    lower: list[list[int]] = [[] for _ in heights]
    upper: list[list[int]] = [[] for _ in heights]
    for left, right in parts:
        upper[right].append(left)
        lower[left].append(right)
    middles = [0.0] * len(heights)
    steps = [_steps(layer, heights, boxes, spaces) for layer in layers]
    for layer, offsets in zip(layers, steps, strict=True):
        for item, offset in zip(layer, offsets, strict=True):
            middles[item] = offset - offsets[-1] / 2
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        order = range(len(layers)) if forth else range(len(layers) - 1, -1, -1)
        for rank in order:
            layer = layers[rank]
            wanted = []
            for item in layer:
                # To one side while they settle, to both in the end.
                near = upper[item] if forth else lower[item]
                if sweep >= _SWEEPS - 2:
                    near = upper[item] + lower[item]
                if not near:
                    near = [item]
                wanted.append(statistics.fmean(middles[other] for other in near))
            for item, middle in zip(layer, _apart(wanted, steps[rank]), strict=True):
                middles[item] = middle
    highest = min((m - h / 2 for m, h in zip(middles, heights, strict=True)), default=0)
    return [middle - highest for middle in middles]


def _steps(
    layer: Sequence[int], heights: Sequence[float], boxes: int, spaces: Spaces
) -> list[float]:
    """Return how far below the first each of a column must at least be."""
    steps = [0.0]
    for above, below in itertools.pairwise(layer):
        gap = spaces.boxes if above < boxes and below < boxes else spaces.links
        steps.append(steps[-1] + heights[above] / 2 + gap + heights[below] / 2)
    return steps


def _apart(wanted: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return the places nearest to those wanted (squares) that keep their distances."""
    # Pools adjacent violators: who would come before another moves together with it.
    pools: list[tuple[float, int]] = []
    for place, step in zip(wanted, steps, strict=True):
        total, count = place - step, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            more, others = pools.pop()
            total, count = total + more, count + others
        pools.append((total, count))
    starts = [total / count for total, count in pools for _ in range(count)]
    return [start + step for start, step in zip(starts, steps, strict=True)]


def _measured(
    sizes: Sequence[Point],
    columns: Sequence[int],
    chains: Sequence[tuple[Sequence[int], bool]],
    middles: Sequence[float],
    spaces: Spaces,
) -> Placed:
    widths = [0.0] * (max(columns, default=-1) + 1)
    for column, (width, _) in zip(columns, sizes, strict=True):
        widths[column] = max(widths[column], width)
    lefts = [0.0]
    for width in widths:
        lefts.append(lefts[-1] + width + spaces.columns)
    corners = [
        (lefts[column] + (widths[column] - width) / 2, middle - height / 2)
        for (width, height), column, middle in zip(
            sizes, columns, middles[: len(sizes)], strict=True
        )
    ]
    passages = []
    for chain, is_turned in chains:
        first = columns[chain[0]]
        points: list[Point] = []
        for rank, item in enumerate(chain[1:-1], first + 1):
            left = lefts[rank]
            points += [(left, middles[item]), (left + widths[rank], middles[item])]
        passages.append(points[::-1] if is_turned else points)
    bottoms = [y + height for (_, y), (_, height) in zip(corners, sizes, strict=True)]
    inner = [y for points in passages for _, y in points]
    return Placed(
        corners=corners,
        columns=columns,
        passages=passages,
        width=max(0.0, lefts[-1] - spaces.columns),
        height=max([*bottoms, *inner], default=0.0),
    )
