"""Draw spans of time as SVG: a row for each place, a box for each span."""

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape

from replicator.monitoring.drawing.boxes import shown, width_of

_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
_INK, _FAINT, _EDGE, _PAPER = "#1f2933", "#52606d", "#7b8794", "#ffffff"
_FILLS = ("#cfe5f7", "#f9dcc4", "#d8efd3", "#eadcf5", "#f7efc0", "#dfe3e8")
_ROW, _BOX, _MARGIN = 30.0, 24.0, 12.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSpan:
    """A span of time in a picture.

    Attributes:
      row: Name of its row; rows are drawn in the order of their first spans.
      start: When it begins, in any unit.
      end: When it ends.
      label: Text in its box, where it fits.
      title: Text for who points at it.
      kind: Spans of one kind have one colour, and the legend names it.
    """

    row: str
    start: float
    end: float
    label: str
    title: str
    kind: str


def spans_svg(spans: Sequence[DrawnSpan], *, title: str, width: float = 900) -> str:
    """Return a picture of spans as SVG, with no script, style or link.

    Args:
      spans: The spans.
      title: Of the picture.
      width: Of the part where time runs, in pixels.

    >>> span = dict(start=0, end=1, label="0", title="op", kind="forward")
    >>> spans_svg([DrawnSpan(row="a", **span)], title="one").count("<rect")
    3
    """
    return "\n".join(_lines(spans, title, width)) + "\n"


def _lines(spans: Sequence[DrawnSpan], title: str, width: float) -> Iterator[str]:
    rows = list(dict.fromkeys(span.row for span in spans))
    kinds = list(dict.fromkeys(span.kind for span in spans))
    fills = {kind: _FILLS[n % len(_FILLS)] for n, kind in enumerate(kinds)}
    left = 2 * _MARGIN + max((width_of(shown(row)) for row in rows), default=0)
    first = min((span.start for span in spans), default=0)
    scale = width / ((max((span.end for span in spans), default=0) - first) or 1)
    whole, height = left + width + _MARGIN, _MARGIN + _ROW * (len(rows) + 1)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {whole:.0f} {height:.0f}" role="img" '
        f'font-family="{_FONT}" font-size="12">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect class="paper" width="100%" height="100%" fill="{_PAPER}"/>'
    for number, row in enumerate(rows):
        y = _MARGIN + _ROW * number + _BOX / 2 + 4
        yield f'<text x="{_MARGIN}" y="{y:.1f}" fill="{_FAINT}">{_text(row)}</text>'
    for span in spans:
        x, y = (
            left + scale * (span.start - first),
            _MARGIN + _ROW * rows.index(span.row),
        )
        yield from _box(span, fills[span.kind], x, y, scale * (span.end - span.start))
    x, y = left, _MARGIN + _ROW * len(rows)
    for kind in kinds:
        square = f'x="{x:.1f}" y="{y:.1f}" width="12" height="12" rx="2"'
        yield f"<rect {square} {_look(fills[kind])}/>"
        where = f'x="{x + 18:.1f}" y="{y + 10:.1f}"'
        yield f'<text {where} fill="{_FAINT}">{_text(kind)}</text>'
        x += 18 + width_of(shown(kind)) + 2 * _MARGIN
    yield "</svg>"


def _box(span: DrawnSpan, fill: str, x: float, y: float, width: float) -> Iterator[str]:
    yield f'<g class="span"><title>{_text(span.title)}</title>'
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BOX}" rx="2" '
        f"{_look(fill)}/>"
    )
    if width_of(span.label) < width:
        middle = f'x="{x + width / 2:.1f}" y="{y + _BOX / 2 + 4:.1f}"'
        label = _text(span.label)
        yield f'<text {middle} text-anchor="middle" fill="{_INK}">{label}</text>'
    yield "</g>"


def _look(fill: str) -> str:
    return f'fill="{fill}" stroke="{_EDGE}" stroke-width="0.8"'


def _text(text: str) -> str:
    return escape(shown(text), quote=True)
