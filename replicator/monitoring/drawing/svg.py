"""Write a picture as SVG: one self-contained text, with no script, style or link.

Colours and fonts are attributes, so a page that forbids inline styles shows it, too,
and may restyle it: by the classes `worker`, `group` and `arrow`, and by `data-worker`
and `data-arrow`.
"""

from collections.abc import Iterator
from html import escape

from replicator.monitoring.drawing.arrows import Arrow, End
from replicator.monitoring.drawing.boxes import Box, shown
from replicator.monitoring.drawing.curves import ArrowLine
from replicator.monitoring.drawing.layout import (
    Drawing,
    DrawnGroup,
    DrawnWorker,
)

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_LINE = 15.0
_INK, _FAINT, _EDGE = "#1f2933", "#52606d", "#7b8794"
_SERVES, _RUNS, _GROUP, _PAPER = "#e3f0fb", "#f5f7fa", "#fbfcfd", "#ffffff"


def svg_of(drawing: Drawing) -> str:
    """Return the picture as SVG."""
    return "\n".join(_lines(drawing)) + "\n"


def _lines(drawing: Drawing) -> Iterator[str]:
    graph, width, height = (
        drawing.graph,
        f"{drawing.width:.0f}",
        f"{drawing.height:.0f}",
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{_FONT}" '
        'font-size="12">'
    )
    yield f"<title>{_text(f'The {graph.kind} {graph.program}')}</title>"
    yield (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="0" refY="4" markerWidth="8" '
        'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0.5 L8 4 L0 7.5 z" fill="{_EDGE}"/></marker></defs>'
    )
    yield f'<rect class="paper" width="100%" height="100%" fill="{_PAPER}"/>'
    for group in drawing.groups:
        yield from _group(group)
    for number, (arrow, curve) in enumerate(drawing.arrows):
        yield from _arrow(number, arrow, curve, graph.edges_are)
    called = {edge.target for edge in graph.edges}
    for worker in drawing.workers:
        fill = _SERVES if worker.vertex.name in called else _RUNS
        yield from _worker(worker, fill, drawing.note_lines)
    yield "</svg>"


def _group(group: DrawnGroup) -> Iterator[str]:
    yield f'<g class="group"><title>{_text(group.label)}</title>'
    yield _rect(
        group.box, 10, f'fill="{_GROUP}" stroke="{_EDGE}" stroke-dasharray="4 3"'
    )
    x, y = group.box.x + 12, group.box.y + 20
    title = _text(group.title)
    yield f'<text x="{x:.1f}" y="{y:.1f}" fill="{_FAINT}">{title}</text></g>'


def _arrow(
    number: int, arrow: Arrow, curve: ArrowLine, edges_are: str
) -> Iterator[str]:
    edges = len(arrow.edges)
    count = arrow.edges[0].argument if edges == 1 else f"{edges} {edges_are}"
    title = f"{_end(arrow.source)} → {_end(arrow.target)}: {count}"
    x, y = curve.caption
    yield f'<g class="arrow" data-arrow="{number}"><title>{_text(title)}</title>'
    yield (
        f'<path d="{curve.path}" fill="none" stroke="{_EDGE}" stroke-width="1.4" '
        'marker-end="url(#head)"/>'
    )
    yield (
        f'<text class="traffic" x="{x:.1f}" y="{y:.1f}" text-anchor="middle" '
        f'font-size="11" fill="{_FAINT}"></text></g>'
    )


def _worker(worker: DrawnWorker, fill: str, note_lines: int) -> Iterator[str]:
    vertex, box = worker.vertex, worker.box
    title = f"{vertex.name}: {vertex.kind} {vertex.text}".rstrip()
    yield f'<g class="worker" data-worker="{_text(vertex.name)}">'
    yield f"<title>{_text(title)}</title>"
    yield _rect(box, 6, f'fill="{fill}" stroke="{_INK}" stroke-width="1"')
    lines = [*worker.lines, *([""] * note_lines)]
    x, y = box.x + box.width / 2, box.middle - _LINE * (len(lines) - 1) / 2 + 4
    for number, line in enumerate(lines):
        is_note = number >= len(worker.lines)
        look = f'font-weight="600" fill="{_INK}"' if not number else f'fill="{_FAINT}"'
        name = ' class="note"' if is_note else ""
        yield (
            f'<text{name} x="{x:.1f}" y="{y + _LINE * number:.1f}" '
            f'text-anchor="middle" {look}>{_text(shown(line))}</text>'
        )
    yield "</g>"


def _rect(box: Box, radius: int, look: str) -> str:
    return (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{radius}" {look}/>'
    )


def _end(end: End) -> str:
    return end.label if end.name is None else end.name


def _text(text: str) -> str:
    """Return text for XML, without the characters that XML cannot hold."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return escape(plain, quote=True)
