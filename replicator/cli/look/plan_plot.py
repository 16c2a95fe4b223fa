"""The picture of a plan as SVG: speed and memory of each row, as bars."""

from collections.abc import Iterator, Sequence

from replicator.cli.look.report_page.markup import Markup, element
from replicator.tuning.plan import PlanRow

_LINE, _LEFT, _BAR, _GAP = 22.0, 250.0, 260.0, 90.0
_TOP = 48.0
_INK, _FAINT = "#1f2933", "#52606d"
_FITS, _UNKNOWN, _LACKS = "#3d8fd1", "#9fb3c8", "#d64545"
_FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"


def plot_of(rows: Sequence[PlanRow]) -> str:
    """Return the picture: examples a second, and memory of a device."""
    width = _LEFT + 2 * (_BAR + _GAP)
    height = _TOP + _LINE * len(rows) + 12
    drawn = element(
        "svg",
        element("title", "Speed and memory by topology and strategy"),
        element("rect", width="100%", height="100%", fill="#ffffff"),
        *_heads(),
        *[part for n, row in enumerate(rows) for part in _bars(n, row, rows)],
        xmlns="http://www.w3.org/2000/svg",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        role="img",
        font_family=_FONT,
        font_size="12",
    )
    return drawn + "\n"


def _heads() -> Iterator[Markup]:
    yield _text(_LEFT, 20, "examples a second, nothing hidden")
    yield _text(_LEFT + _BAR + _GAP, 20, "memory of a device, and its limit (line)")
    for x, colour, meaning in (
        (_LEFT, _FITS, "fits"),
        (_LEFT + 60, _UNKNOWN, "forecast"),
        (_LEFT + 150, _LACKS, "does not fit"),
    ):
        yield element("rect", x=x, y=28, width=10, height=10, fill=colour)
        yield _text(x + 15, 37, meaning, colour=_FAINT)


def _bars(number: int, row: PlanRow, rows: Sequence[PlanRow]) -> Iterator[Markup]:
    y = _TOP + _LINE * number
    colour = {True: _FITS, False: _LACKS, None: _UNKNOWN}[row.fits]
    yield _text(8, y + 14, f"{row.topology} {row.strategy}")
    speed = row.examples_per_s or 0.0
    fastest = max(each.examples_per_s or 0.0 for each in rows)
    if speed:
        yield _bar(_LEFT, y, speed / fastest, colour)
        yield _text(_LEFT + _BAR * speed / fastest + 5, y + 14, f"{speed:,.4g}")
    elif row.outcome.status not in ("compiled", "forecast"):
        yield _text(_LEFT, y + 14, row.outcome.status, colour=_FAINT)
    left = _LEFT + _BAR + _GAP
    needed = row.outcome.memory_bytes or row.outcome.state_bytes
    most = max(
        max(each.outcome.memory_bytes or each.outcome.state_bytes for each in rows),
        max(each.limit_bytes or 0.0 for each in rows),
    )
    if needed:
        yield _bar(left, y, needed / most, colour)
        gib = f"{needed / 2**30:.3g} GiB"
        yield _text(left + _BAR * needed / most + 5, y + 14, gib)
    if row.limit_bytes is not None:
        x = f"{left + _BAR * row.limit_bytes / most:.1f}"
        yield element(
            "line", x1=x, x2=x, y1=y + 1, y2=y + _LINE - 3, stroke=_INK, stroke_width=2
        )


def _bar(x: float, y: float, share: float, colour: str) -> Markup:
    return element(
        "rect",
        x=f"{x:.1f}",
        y=f"{y + 3:.1f}",
        width=f"{max(_BAR * share, 1):.1f}",
        height=_LINE - 7,
        fill=colour,
    )


def _text(x: float, y: float, text: str, *, colour: str = _INK) -> Markup:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", fill=colour)
