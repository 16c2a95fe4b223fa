"""Put the page together: one file that loads nothing from a network."""

import datetime
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from replicator.base.version import __version__
from replicator.cli.look.report_page import sections
from replicator.cli.look.report_page.checkpoints import list_checkpoints
from replicator.cli.look.report_page.curves import make_curves
from replicator.cli.look.report_page.markup import Markup, element, raw
from replicator.cli.look.report_page.plots import cards, plot_data, plotly_script
from replicator.cli.look.report_page.run_files import RunFiles, read_run
from replicator.monitoring.goodput import Goodput, goodput

# The browser itself refuses all requests of the page, or of a name in it.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def write_report(directory: Path, target: Path) -> None:
    """Write the page of a run.

    Args:
      directory: Directory of the run.
      target: The page; replaced if it is there.

    Raises:
      ArgumentError: `directory` is not the directory of a run.
      ImportError: plotly is not installed.
      OSError: The page cannot be written.
    """
    target.write_text(make_page(read_run(directory)), encoding="utf-8")


def make_page(run: RunFiles) -> str:
    """Return the page of a run as HTML.

    Raises:
      ImportError: plotly is not installed.
    """
    curves = make_curves(run.rows, run.earlier)
    spent = time_spent(run.events)
    body = element(
        "body",
        sections.head(run),
        sections.tiles(run, curves, spent),
        sections.problems(run),
        sections.goodput_bar(spent),
        cards(curves),
        sections.events(run.events),
        element(
            "div",
            sections.environment(run.record),
            sections.arguments(run.record),
            element(
                "div",
                sections.strategy(run.record),
                sections.checkpoints(list_checkpoints(run)),
                sections.left_files(run.left),
            ),
            class_="columns",
        ),
        element("footer", _made(run)),
        plot_data(run, curves),
        plotly_script(),
        element("script", raw(_asset("page.js"))),
    )
    return f"<!doctype html>\n{element('html', _head(run), body, lang='en')}\n"


def time_spent(events: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Return the goodput of a run; None if its journal has no usable events.

    >>> time_spent([]) is None
    True
    """
    try:
        found = goodput(events)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # a journal of another version, or edited by hand
    return found if found.wall_s > 0 else None


def _head(run: RunFiles) -> Markup:
    return element(
        "head",
        raw('<meta charset="utf-8">'),
        raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        raw(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("title", f"{run.directory.resolve().name} · replicator"),
        element("style", raw(_asset("page.css"))),
    )


def _made(run: RunFiles) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return f"replicator {__version__} · {run.directory} · {now:%Y-%m-%d %H:%M} UTC"


def _asset(name: str) -> str:
    files = resources.files("replicator.cli.look.report_page")
    return (files / name).read_text(encoding="utf-8")
