"""Where each group, worker and arrow of a program stands in its picture.

Groups are laid out first, each as large as what is in it: workers below each other
where single ones call or are called, else in a grid. Then the groups, in columns.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from replicator.launchpad_bridge.graph import Graph, Vertex
from replicator.launchpad_bridge.view.drawing.arrows import Arrow, End, arrows_of
from replicator.launchpad_bridge.view.drawing.boxes import Box, shown, width_of
from replicator.launchpad_bridge.view.drawing.curves import Curve, curves_of
from replicator.launchpad_bridge.view.drawing.layers import Point, place

_PADDING = 12.0
_TITLE = 22.0
_MARGIN = 16.0
_GAP = 10.0
_LINE = 15.0
_WITHOUT, _WITH_TRAFFIC = 72.0, 132.0
"""How far columns stand apart; where arrows bear words, about as wide as these are."""
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
    number = {label: i for i, label in enumerate(groups)}
    pairs = [(number[a.source.label], number[a.target.label]) for a in arrows]
    links = [link for link in dict.fromkeys(pairs) if link[0] != link[1]]
    placed = place(
        [group.size for group in groups.values()],
        links,
        between_columns=_WITH_TRAFFIC if note_lines else _WITHOUT,
    )
    workers: list[DrawnWorker] = []
    frames: list[DrawnGroup] = []
    corners = _moved(placed.corners, _MARGIN)
    for (label, group), (x, y) in zip(groups.items(), corners, strict=True):
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
    passages = dict(zip(links, placed.passages, strict=True))
    ways = [_moved(passages.get(pair, ()), _MARGIN) for pair in pairs]
    curves = curves_of(arrows, boxes, ways)
    rightmost = max((curve.right for curve in curves), default=0.0)
    return Layout(
        graph=graph,
        workers=workers,
        groups=frames,
        arrows=list(zip(arrows, curves, strict=True)),
        width=max(placed.width + 2 * _MARGIN, rightmost + _GAP),
        height=placed.height + 2 * _MARGIN,
        note_lines=note_lines,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    workers: Sequence[DrawnWorker]
    size: Point
    title: str = ""


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
    step = size[0] + _GAP, size[1] + _GAP
    per_row = _per_row(label, len(vertices), arrows, step)
    rows = math.ceil(len(vertices) / per_row)
    what = f" {next(iter(texts))}" if is_alike and any(texts) else ""
    title = shown(f"{label} · {len(vertices)} \N{MULTIPLICATION SIGN}{what}")
    widest = max(per_row * step[0] - _GAP, width_of(title))
    left = _PADDING + (widest - per_row * step[0] + _GAP) / 2
    top = _PADDING + _TITLE
    workers = [
        DrawnWorker(
            vertex=vertex,
            box=_box(
                (left + i % per_row * step[0], top + i // per_row * step[1]), size
            ),
            lines=lines,
        )
        for i, (vertex, lines) in enumerate(zip(vertices, lines_of, strict=True))
    ]
    height = top + rows * step[1] - _GAP + _PADDING
    return _Group(workers=workers, size=(widest + 2 * _PADDING, height), title=title)


def _per_row(label: str, count: int, arrows: Sequence[Arrow], step: Point) -> int:
    """Return how many workers of a group stand beside each other."""
    ends = [end for arrow in arrows for end in (arrow.source, arrow.target)]
    if any(end.label == label and end.name is not None for end in ends):
        return 1
    return max(1, round(math.sqrt(count * _LOWEST_GRID * step[1] / step[0])))


def _moved(points: Iterable[Point], by: float) -> list[Point]:
    return [(x + by, y + by) for x, y in points]


def _size(lines: Sequence[str], note_lines: int) -> Point:
    width = max(width_of(shown(line)) for line in lines)
    least = 112.0 if note_lines else 40.0
    return max(width + 24.0, least), _LINE * (len(lines) + note_lines) + 14.0


def _box(corner: Point, size: Point) -> Box:
    return Box(x=corner[0], y=corner[1], width=size[0], height=size[1])
