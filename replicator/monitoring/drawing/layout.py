"""Lay out the picture of a program: its groups, workers and arrows.

Groups are laid out first, each as large as its contents: workers below each other where
single ones call or are called, else in a grid. Then the groups, in columns.
"""

import dataclasses
import math
from collections.abc import Sequence

from replicator.monitoring.drawing.arrows import Arrow, End, arrows_of
from replicator.monitoring.drawing.boxes import Box, shown, width_of
from replicator.monitoring.drawing.captions import with_captions
from replicator.monitoring.drawing.curves import ArrowLine, curves_of
from replicator.monitoring.drawing.graph import Graph, Vertex
from replicator.monitoring.drawing.layers import Point, place

_PADDING = 12.0
_TITLE = 22.0
_MARGIN = 16.0
_GAP = 10.0
_LINE = 15.0
_WITHOUT, _WITH_TRAFFIC = 72.0, 132.0
"""Distance between columns; with captions of arrows, about as wide as these."""
_LOWEST_GRID = 1.8
"""Ratio of width to height of a grid of workers, about."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnWorker:
    """A worker in the picture.

    Attributes:
      vertex: The worker.
      box: Place and size of its box.
      lines: Lines of text in it, top first.
    """

    vertex: Vertex
    box: Box
    lines: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnGroup:
    """A box around the workers of a group.

    Attributes:
      label: Label of the group.
      title: Text above them; "" for one worker, which needs no box.
      box: Place and size.
    """

    label: str
    title: str
    box: Box


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A picture, before it is written in any format.

    Attributes:
      graph: Graph of the program.
      workers: All workers.
      groups: Boxes of the groups that have several.
      arrows: Arrows between them, with their lines.
      width: Width of the picture.
      height: Height of the picture.
      note_lines: Number of lines left free in each worker's box, below its text.
    """

    graph: Graph
    workers: Sequence[DrawnWorker]
    groups: Sequence[DrawnGroup]
    arrows: Sequence[tuple[Arrow, ArrowLine]]
    width: float
    height: float
    note_lines: int


def lay_out(graph: Graph, *, note_lines: int = 0) -> Drawing:
    """Return the picture of a graph.

    Args:
      graph: Graph of a program.
      note_lines: Number of lines to leave free in each worker's box; if there are any,
        arrows have room for captions, too.
    """
    arrows = arrows_of(graph)
    groups = [
        _group(label, group, arrows, note_lines)
        for label, group in graph.groups().items()
    ]
    number = {frame.label: i for i, (frame, _) in enumerate(groups)}
    pairs = [(number[a.source.label], number[a.target.label]) for a in arrows]
    corners = place(
        [(frame.box.width, frame.box.height) for frame, _ in groups],
        [link for link in dict.fromkeys(pairs) if link[0] != link[1]],
        between_columns=_WITH_TRAFFIC if note_lines else _WITHOUT,
    )
    workers: list[DrawnWorker] = []
    boxes: dict[End, Box] = {}
    for (frame, inside), (x, y) in zip(groups, corners, strict=True):
        by = x + _MARGIN, y + _MARGIN
        boxes[End(label=frame.label, name=None)] = frame.box.moved(*by)
        for worker in inside:
            workers.append(dataclasses.replace(worker, box=worker.box.moved(*by)))
            end = End(label=frame.label, name=worker.vertex.name)
            boxes[end] = workers[-1].box
    curves, captions = curves_of(arrows, boxes), []
    if note_lines:
        curves, captions = with_captions(curves, boxes.values())
    rights = [box.right + _MARGIN for box in [*boxes.values(), *captions]]
    bottoms = [box.bottom for box in [*boxes.values(), *captions]]
    return Drawing(
        graph=graph,
        workers=workers,
        groups=[
            dataclasses.replace(frame, box=boxes[End(label=frame.label, name=None)])
            for frame, _ in groups
            if frame.title
        ],
        arrows=list(zip(arrows, curves, strict=True)),
        width=max([*rights, *(curve.right + _GAP for curve in curves)], default=0.0),
        height=max([*bottoms, *(curve.bottom for curve in curves)], default=0)
        + _MARGIN,
        note_lines=note_lines,
    )


def _group(
    label: str, vertices: Sequence[Vertex], arrows: Sequence[Arrow], note_lines: int
) -> tuple[DrawnGroup, list[DrawnWorker]]:
    """Lay one group out, with its corner at (0, 0)."""
    texts = {vertex.text for vertex in vertices}
    # A text that all of several have is written once, above.
    is_shared = len(vertices) > 1 and len(texts) == 1
    lines_of = [
        [vertex.name] if is_shared or not vertex.text else [vertex.name, vertex.text]
        for vertex in vertices
    ]
    sizes = [_size(lines, note_lines) for lines in lines_of]
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    step = width + _GAP, height + _GAP
    title, around, above = "", 0.0, 0.0
    if len(vertices) > 1:
        text = f" {next(iter(texts))}" if is_shared and any(texts) else ""
        title = shown(f"{label} · {len(vertices)} \N{MULTIPLICATION SIGN}{text}")
        around, above = _PADDING, _TITLE
    per_row = _per_row(label, len(vertices), arrows, step)
    rows = math.ceil(len(vertices) / per_row)
    widest = max(per_row * step[0] - _GAP, width_of(title))
    left, top = around + (widest - per_row * step[0] + _GAP) / 2, around + above
    workers = [
        DrawnWorker(
            vertex=vertex,
            box=Box(
                x=left + i % per_row * step[0],
                y=top + i // per_row * step[1],
                width=width,
                height=height,
            ),
            lines=lines,
        )
        for i, (vertex, lines) in enumerate(zip(vertices, lines_of, strict=True))
    ]
    bottom = top + rows * step[1] - _GAP + around
    box = Box(x=0.0, y=0.0, width=widest + 2 * around, height=bottom)
    return DrawnGroup(label=label, title=title, box=box), workers


def _per_row(label: str, count: int, arrows: Sequence[Arrow], step: Point) -> int:
    """Return the number of workers of a group beside each other."""
    ends = [end for arrow in arrows for end in (arrow.source, arrow.target)]
    if any(end.label == label and end.name is not None for end in ends):
        return 1
    wanted = round(math.sqrt(count * _LOWEST_GRID * step[1] / step[0]))
    return min(count, max(1, wanted))


def _size(lines: Sequence[str], note_lines: int) -> Point:
    width = max(width_of(shown(line)) for line in lines)
    least = 112.0 if note_lines else 40.0
    return max(width + 24.0, least), _LINE * (len(lines) + note_lines) + 14.0
