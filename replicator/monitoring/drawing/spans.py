"""Draw what took which time where: a row for each place, a bar for each span."""

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape

from replicator.monitoring.drawing.boxes import width_of

_COLOURS = ("#9ec5e8", "#f3c08b", "#a9d6a5", "#d5b3e0", "#f0a8a8", "#c9c9c9")
_ROW, _BAR, _LEFT, _WIDTH = 26.0, 20.0, 120.0, 900.0
_INK = "#1f2933"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A bar: `row` says where, `name` what, and `kind` its colour."""

    row: str
    begin_s: float
    end_s: float
    name: str
    kind: str


def spans_svg(spans: Sequence[Span], *, unit: str = "") -> str:
    """Return the picture as SVG, with no script, style or link.

    Args:
      spans: The bars.
      unit: What their times count, where these are no seconds.
    """
    return "\n".join(_lines(spans, unit)) + "\n"


def _lines(spans: Sequence[Span], unit: str) -> Iterator[str]:
    rows = sorted({span.row for span in spans})
    kinds = list(dict.fromkeys(span.kind for span in spans))
    begin_s = min((span.begin_s for span in spans), default=0.0)
    whole_s = max((span.end_s for span in spans), default=0.0) - begin_s or 1.0
    width, height = _LEFT + _WIDTH + 20, _ROW * (len(rows) + 2)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="12">'
    )
    yield f"<title>{len(spans)} spans in {_length(whole_s, unit)}</title>"
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'
    x = _LEFT
    for number, kind in enumerate(kinds):
        colour = _COLOURS[number % len(_COLOURS)]
        yield f'<rect x="{x:.1f}" y="6" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 16, 16, kind)
        x += 36 + width_of(kind)
    for number, row in enumerate(rows):
        yield _text(8, _ROW * (number + 1) + 14, row)
    scale = _WIDTH / whole_s
    for span in spans:
        colour = _COLOURS[kinds.index(span.kind) % len(_COLOURS)]
        x, y = _LEFT + (span.begin_s - begin_s) * scale, rows.index(span.row)
        wide = max((span.end_s - span.begin_s) * scale, 0.5)
        length = _length(span.end_s - span.begin_s, unit)
        title = f"{span.name} ({span.kind}): {length}"
        yield (
            f'<rect class="span" x="{x:.1f}" y="{_ROW * (y + 1):.1f}" '
            f'width="{wide:.1f}" height="{_BAR}" fill="{colour}" stroke="{_INK}" '
            f'stroke-width="0.3"><title>{escape(title)}</title></rect>'
        )
        if width_of(span.name) < wide:
            yield _text(x + 2, _ROW * (y + 1) + 14, span.name)
    yield _text(_LEFT, _ROW * (len(rows) + 1) + 14, f"0 to {_length(whole_s, unit)}")
    yield "</svg>"


def _length(time_s: float, unit: str) -> str:
    return f"{time_s:.4g} {unit}" if unit else f"{time_s * 1e3:.4g} ms"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_INK}">{escape(text)}</text>'
