"""The curves of the page: cards that a script fills, their data, and plotly itself.

plotly.js is packed into the page (2 MB), so that it opens years from now, on a machine
without a network: it draws SVG, zooms and shows values, and comes by pip, locked by
hash (extra `report`). matplotlib's SVG does neither, bokeh brings pandas. Only the
script is used: plotly's Python objects take a second to import.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from replicator.base.optional_package import optional_package
from replicator.cli.look.report_page import formats
from replicator.cli.look.report_page.curves import (
    ABOUT_THE_RUN,
    Line,
    MetricCurve,
    group_curves,
    process_starts,
)
from replicator.cli.look.report_page.markup import Markup, element, raw
from replicator.cli.look.report_page.run_files import RunFiles
from replicator.cli.look.report_page.sections import BAD_KINDS, ODD_KINDS, tone_of

_MOST_MARKS = 100
_MOST_BAD_STEPS = 5


def plotly_script() -> Markup:
    """Return plotly.js, packed, in an element that does not run before it is unpacked.

    Raises:
      ImportError: plotly is not installed.
    """
    with optional_package("report", "plotly", extra="report"):
        script = resources.files("plotly") / "package_data" / "plotly.min.js"
    packed = base64.b64encode(gzip.compress(script.read_bytes(), mtime=0))
    return element("script", raw(packed.decode()), type="text/plain", id="plotly")


def cards(curves: Sequence[MetricCurve]) -> Markup:
    """Return a card for each curve; a script draws in them."""
    if not curves:
        text = element("p", "No metrics were written.", class_="sub")
        return element("section", element("h2", "Metrics"), text)
    numbers = {id(curve): number for number, curve in enumerate(curves)}
    users, runs = [], []
    for prefix, group in group_curves(curves).items():
        drawn = runs if prefix in ABOUT_THE_RUN else users
        drawn += [_card(numbers[id(curve)], curve) for curve in group]
    return element(
        "div",
        _controls(curves),
        _grid("Metrics", users, class_="grid"),
        _grid("The run itself", runs, class_="grid small"),
        id="curves",
    )


def plot_data(run: RunFiles, curves: Sequence[MetricCurve]) -> Markup:
    """Return the data that the script draws, as JSON in an element that is not run."""
    data = {
        "curves": [
            {
                "line": _points(curve.line),
                "earlier": [_points(line) for line in curve.earlier],
                "bytes": _is_bytes(curve),
            }
            for curve in curves
        ],
        "marks": _marks(run),
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # In a script nothing is unescaped, and "</script>" ends it anywhere.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return element("script", raw(text), type="application/json", id="data")


def _grid(title: str, drawn: Sequence[Markup], *, class_: str) -> Markup | None:
    if not drawn:
        return None
    return element(
        "section", element("h2", title), element("div", *drawn, class_=class_)
    )


def _controls(curves: Sequence[MetricCurve]) -> Markup:
    several = any(curve.earlier for curve in curves)
    return element(
        "form",
        element("label", "over ", _choice("x", ("steps", "time"))),
        element("label", "scale ", _choice("scale", ("linear", "log"))),
        element(
            "label",
            "smooth ",
            element(
                "input",
                type="range",
                name="smooth",
                min="0",
                max="0.98",
                step="0.02",
                value="0",
            ),
        ),
        _box("marks", "events"),
        _box("earlier", "earlier runs") if several else None,
        element("span", "drag to zoom, double-click to zoom out", class_="sub"),
        id="controls",
    )


def _choice(name: str, options: Sequence[str]) -> Markup:
    return element("select", *[element("option", each) for each in options], name=name)


def _box(name: str, label: str) -> Markup:
    box = element("input", type="checkbox", name=name, checked=True)
    return element("label", box, f" {label}")


def _card(number: int, curve: MetricCurve) -> Markup:
    write = formats.size if _is_bytes(curve) else formats.number
    text = write(curve.last)
    extent = f"from {write(curve.least)} to {write(curve.greatest)}"
    prefix, slash, name = curve.name.removeprefix("progress/").rpartition("/")
    return element(
        "figure",
        element(
            "figcaption",
            element("b", element("i", prefix + slash), name, title=curve.name),
            element("span", text, title=f"the last; all are {extent}"),
            element("button", "⤢", type="button", title="wide or narrow"),
        ),
        element("p", _bad(curve.bad_steps), class_="bad") if curve.bad_steps else None,
        element("div", class_="plot", data_curve=number),
    )


def _is_bytes(curve: MetricCurve) -> bool:
    return "bytes" in curve.name


def _bad(steps: Sequence[int]) -> str:
    some = ", ".join(f"{step:,}" for step in steps[:_MOST_BAD_STEPS])
    more = ", …" if len(steps) > _MOST_BAD_STEPS else ""
    return f"not finite at {len(steps):,} steps: {some}{more}"


def _points(line: Line) -> dict[str, Any]:
    return {"steps": line.steps, "seconds": line.seconds, "values": line.values}


def _marks(run: RunFiles) -> list[dict[str, Any]]:
    """Return the events that are marked on the curves."""
    marks = [
        {"step": event["step"], "kind": kind, "tone": tone_of(kind)}
        for event in run.events
        if (kind := str(event.get("kind"))) in BAD_KINDS | ODD_KINDS
        and isinstance(event.get("step"), int)
    ]
    if not any(mark["kind"] == "resumed" for mark in marks):
        marks += [_process_mark(step) for step in process_starts(run.rows)]
    return marks[-_MOST_MARKS:]


def _process_mark(step: int) -> dict[str, Any]:
    return {"step": step, "kind": "another process", "tone": "odd"}
