"""Print tables on standard output, as wide as the terminal; plain in a pipe."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 100
_STYLES = {
    "ok": "green",
    "warn": "yellow",
    "fail": "bold red",
    "running": "green",
    "waiting": "yellow",
    "raised": "bold red",
    "died": "bold red",
}


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
) -> None:
    """Print rows below a header.

    Args:
      header: The columns; the last takes the room that is left.
      rows: A cell per column, shown as it is; `ok`, `warn` and `fail` get a colour if
        the terminal has colours.
      right: Columns of numbers, aligned to the right.

    >>> print_table(("check", "status"), [("disk", "ok")])
    <BLANKLINE>
      check   status
     ────────────────
      disk    ok
    <BLANKLINE>
    """
    make_console().print(_table(header, rows, right=right))


def live_display() -> Live:
    """Return a live display, which `show_table` redraws; the last table stays."""
    return Live(console=make_console(), auto_refresh=False)


def show_table(
    live: Live,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    above: str = "",
    below: str = "",
    right: Iterable[str] = (),
) -> None:
    """Redraw a table.

    Args:
      live: The display.
      header: The columns.
      rows: A cell per column, shown as it is.
      above: A line before it.
      below: A line after it; "" for none.
      right: Columns of numbers, aligned to the right.
    """
    table = _table(header, rows, right=right)
    parts = [Text(above), table, *([Text(below)] if below else [])]
    live.update(Group(*parts), refresh=True)


def _table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
) -> Table:
    table = Table(box=SIMPLE_HEAD)
    ends_below = set(right)
    for name in header:
        justify = "right" if name in ends_below else "left"
        table.add_column(name, overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    return table


def make_console() -> Console:
    """Return a console on the present standard output; it obeys `NO_COLOR`."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if terminal else _PIPE_WIDTH)


def _cell(value: object) -> Text:
    text = str(value)
    return Text(text, style=_STYLES.get(text, ""))
