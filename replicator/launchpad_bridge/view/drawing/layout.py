"""Where each group, worker and arrow of a program stands in its picture.

Groups are laid out first, each as large as what is in it: workers in layers where they
call each other, below each other where others call single ones, else in a grid. Then
the groups themselves in layers, and those without any arrow in rows below.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from replicator.launchpad_bridge.graph import Graph, Vertex
from replicator.launchpad_bridge.view.drawing.arrows import Arrow, End, arrows_of
from replicator.launchpad_bridge.view.drawing.boxes import Box, shown, width_of
from replicator.launchpad_bridge.view.drawing.curves import Curve, curves_of
from replicator.launchpad_bridge.view.drawing.layers import Link, Point, Spaces, place

_PADDING = 12.0
_TITLE = 22.0
_MARGIN = 16.0
_GAP = 10.0
_LINE = 15.0
_TRAFFIC = 132.0
"""Columns stand so far apart where arrows bear words: about as wide as these are."""
_WIDEST_ALONE = 760.0
"""Groups without arrows fill rows as wide as this, or as the picture."""
_LOWEST_GRID = 1.8
"""A grid of workers is about so much wider than high."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnWorker:
    """A worker in the picture.

    Attributes:
      vertex: The worker.
      box: Where it stands.
      lines: What is written in it, top first.
    """

    vertex: Vertex
    box: Box
    lines: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnGroup:
    """A box around several workers.

    Attributes:
      label: Of the group.
      title: What is written above them.
      box: Where it stands.
    """

    label: str
    title: str
    box: Box


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A picture, before it is written in any format.

    Attributes:
      graph: What it shows.
      workers: All workers.
      groups: Boxes of the groups that have several.
      arrows: Lines between them, and how they run.
      width: Of the picture.
      height: Of the picture.
      note_lines: Lines left free in each worker's box, below those written there.
    """

    graph: Graph
    workers: Sequence[DrawnWorker]
    groups: Sequence[DrawnGroup]
    arrows: Sequence[tuple[Arrow, Curve]]
    width: float
    height: float
    note_lines: int


def lay_out(graph: Graph, *, note_lines: int = 0) -> Layout:
    """Return the picture of a graph.

    Args:
      graph: Of a program.
      note_lines: Lines to leave free in each worker's box; then arrows have room for
        words, too.
    """
    arrows = arrows_of(graph)
    groups = {
        label: _group(label, group, arrows, note_lines)
        for label, group in graph.groups().items()
    }
    labels = list(groups)
    number = {label: i for i, label in enumerate(labels)}
    across = [arrow for arrow in arrows if arrow.source.label != arrow.target.label]
    links = _unique(
        (number[arrow.source.label], number[arrow.target.label]) for arrow in across
    )
    origins, passages, width, height = _origins(
        [groups[label].size for label in labels],
        links,
        Spaces(columns=_TRAFFIC) if note_lines else Spaces(),
    )
    workers: list[DrawnWorker] = []
    frames: list[DrawnGroup] = []
    for label, (x, y) in zip(labels, origins, strict=True):
        group = groups[label]
        workers += [
            dataclasses.replace(worker, box=worker.box.moved(x, y))
            for worker in group.workers
        ]
        if group.title:
            w, h = group.size
            box = Box(x=x, y=y, width=w, height=h)
            frames.append(DrawnGroup(label=label, title=group.title, box=box))
    boxes: dict[End, Box] = {
        End(label=worker.vertex.label, name=worker.vertex.name): worker.box
        for worker in workers
    }
    boxes |= {End(label=frame.label, name=None): frame.box for frame in frames}
    ways: dict[tuple[str, str], Sequence[Point]] = {
        (labels[source], labels[target]): points
        for (source, target), points in zip(links, passages, strict=True)
    }
    for group, origin in zip(groups.values(), origins, strict=True):
        ways |= {pair: _moved(points, origin) for pair, points in group.ways.items()}
    return Layout(
        graph=graph,
        workers=workers,
        groups=frames,
        arrows=list(
            zip(
                arrows,
                curves_of(arrows, boxes, [_way(a, ways) for a in arrows]),
                strict=True,
            )
        ),
        width=width + 2 * _MARGIN,
        height=height + 2 * _MARGIN,
        note_lines=note_lines,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    workers: Sequence[DrawnWorker]
    size: Point
    title: str = ""
    ways: Mapping[tuple[str, str], Sequence[Point]] = dataclasses.field(
        default_factory=dict
    )


def _group(
    label: str, vertices: Sequence[Vertex], arrows: Sequence[Arrow], note_lines: int
) -> _Group:
    """Lay one group out, with its corner at (0, 0)."""
    texts = {vertex.text for vertex in vertices}
    if len(vertices) == 1:
        (vertex,) = vertices
        lines = [vertex.name, *([vertex.text] if vertex.text else [])]
        size = _size(lines, note_lines)
        worker = DrawnWorker(vertex=vertex, box=_box((0.0, 0.0), size), lines=lines)
        return _Group(workers=[worker], size=size)
    # What all of them run is said once, above.
    is_alike = len(texts) == 1
    lines_of = [
        [vertex.name] if is_alike or not vertex.text else [vertex.name, vertex.text]
        for vertex in vertices
    ]
    sizes = [_size(lines, note_lines) for lines in lines_of]
    size = max(w for w, _ in sizes), max(h for _, h in sizes)
    corners, ways, (width, height) = _inside(
        label, vertices, arrows, size, _TRAFFIC if note_lines else 44.0
    )
    what = f" {next(iter(texts))}" if is_alike and any(texts) else ""
    title = shown(f"{label} · {len(vertices)} \N{MULTIPLICATION SIGN}{what}")
    widest = max(width, width_of(title))
    origin = _PADDING + (widest - width) / 2, _PADDING + _TITLE
    workers = [
        DrawnWorker(vertex=vertex, box=_box(corner, size), lines=lines)
        for vertex, lines, corner in zip(
            vertices, lines_of, _moved(corners, origin), strict=True
        )
    ]
    return _Group(
        workers=workers,
        size=(widest + 2 * _PADDING, height + 2 * _PADDING + _TITLE),
        title=title,
        ways={pair: _moved(points, origin) for pair, points in ways.items()},
    )


def _inside(
    label: str,
    vertices: Sequence[Vertex],
    arrows: Sequence[Arrow],
    size: Point,
    columns: float,
) -> tuple[Sequence[Point], dict[tuple[str, str], Sequence[Point]], Point]:
    """Return the corners of a group's workers, ways between them, the size of all."""
    number = {vertex.name: i for i, vertex in enumerate(vertices)}
    ends = [(a.source, a.target) for a in arrows]
    inner = _unique(
        (number[source.name], number[target.name])
        for source, target in ends
        if source.label == target.label == label
        and source.name is not None
        and target.name is not None
    )
    if inner:
        placed = place(
            [size] * len(vertices),
            inner,
            Spaces(columns=columns, boxes=_GAP, links=8.0),
        )
        ways = {
            (vertices[source].name, vertices[target].name): points
            for (source, target), points in zip(inner, placed.passages, strict=True)
        }
        return placed.corners, ways, (placed.width, placed.height)
    is_called_singly = any(
        end.label == label and end.name is not None
        for pair in ends
        if pair[0].label != pair[1].label
        for end in pair
    )
    width, height = size[0] + _GAP, size[1] + _GAP
    per_row = 1
    if not is_called_singly:
        per_row = max(
            1, round(math.sqrt(len(vertices) * _LOWEST_GRID * height / width))
        )
    corners = [
        (i % per_row * width, i // per_row * height) for i in range(len(vertices))
    ]
    rows = math.ceil(len(vertices) / per_row)
    return corners, {}, (per_row * width - _GAP, rows * height - _GAP)


def _origins(
    sizes: Sequence[Point], links: Sequence[Link], spaces: Spaces
) -> tuple[list[Point], Sequence[Sequence[Point]], float, float]:
    """Return the corner of each group, the passages of links, width and height."""
    linked = sorted({end for link in links for end in link})
    number = {group: i for i, group in enumerate(linked)}
    placed = place(
        [sizes[group] for group in linked],
        [(number[source], number[target]) for source, target in links],
        spaces,
    )
    origins: dict[int, Point] = dict(zip(linked, placed.corners, strict=True))
    widest = max(_WIDEST_ALONE, placed.width)
    x, y, row = 0.0, placed.height + (2 * _GAP if linked else 0.0), 0.0
    width, height = placed.width, placed.height
    for group, (w, h) in enumerate(sizes):
        if group in origins:
            continue
        if x and x + w > widest:
            x, y, row = 0.0, y + row + 2 * _GAP, 0.0
        origins[group] = x, y
        width, height = max(width, x + w), max(height, y + h)
        x, row = x + w + 2 * _GAP, max(row, h)
    margin = _MARGIN, _MARGIN
    corners = _moved([origins[group] for group in range(len(sizes))], margin)
    passages = [_moved(points, margin) for points in placed.passages]
    return corners, passages, width, height


def _way(
    arrow: Arrow, ways: Mapping[tuple[str, str], Sequence[Point]]
) -> Sequence[Point]:
    """Return the passages of an arrow: between two groups, or inside of one."""
    source, target = arrow.source, arrow.target
    if source.label != target.label:
        return ways[source.label, target.label]
    return ways.get((source.name or "", target.name or ""), ())


def _moved(points: Iterable[Point], by: Point) -> list[Point]:
    return [(x + by[0], y + by[1]) for x, y in points]


def _unique(links: Iterable[Link]) -> list[Link]:
    return [link for link in dict.fromkeys(links) if link[0] != link[1]]


def _size(lines: Sequence[str], note_lines: int) -> Point:
    width = max(width_of(shown(line)) for line in lines)
    least = 112.0 if note_lines else 40.0
    return max(width + 24.0, least), _LINE * (len(lines) + note_lines) + 14.0


def _box(corner: Point, size: Point) -> Box:
    return Box(x=corner[0], y=corner[1], width=size[0], height=size[1])
