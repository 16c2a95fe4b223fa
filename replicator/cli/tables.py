"""Print tables on standard output, as wide as the terminal; plain in a pipe."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 100
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = ""
) -> None:
    """Print rows below a header.

    Args:
      header: The columns; the last takes what room there is.
      rows: A cell a column. What is in them is shown as it is; `ok`, `warn` and `fail`
        get a colour where the terminal has colours.
      title: A line above the table.
    """
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    make_console().print(table)


def make_console() -> Console:
    """Return a console on today's standard output; it obeys `NO_COLOR`."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if terminal else _PIPE_WIDTH)


def _cell(value: object) -> Text:
    told = str(value)
    return Text(told, style=_STYLES.get(told, ""))
