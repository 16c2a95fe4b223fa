"""The page: the program's picture, and a table whose rows its script puts in place."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from replicator.launchpad_bridge.view.watching.columns import (
    COLUMNS,
    about,
    rate,
    rows_of,
    size,
    state_of,
)
from replicator.launchpad_bridge.view.watching.samples import (
    EdgeSample,
    ProgramSample,
    WorkerSample,
)
from replicator.monitoring.drawing.layout import Drawing
from replicator.monitoring.drawing.svg import svg_of

_FOLDER = "replicator.launchpad_bridge.view.dashboard"
NOTE_LINES = 2
"""Lines below a worker's name: its state, and its calls."""


def page_of(drawing: Drawing) -> bytes:
    """Return the page of a program as HTML; names in it are text."""
    name = escape(drawing.graph.program)
    columns = "".join(f"<th>{escape(column)}</th>" for column in COLUMNS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{name} · replicator</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
<script src="page.js" defer></script>
</head>
<body data-phase="" data-updates="0">
<header><h1>{name}</h1><span id="phase"></span><span id="about"></span></header>
<p id="message" hidden></p>
<figure id="graph">
{svg_of(drawing)}</figure>
<table id="workers"><thead><tr>{columns}</tr></thead><tbody></tbody></table>
</body>
</html>
""".encode()


def asset(name: str) -> bytes:
    """Return the page's script or style sheet."""
    return resources.files(_FOLDER).joinpath(name).read_bytes()


def event_of(snapshot: ProgramSample, drawing: Drawing) -> dict[str, object]:
    """Return an event of the page's feed: the sample, and the texts that show it."""
    return {
        **snapshot.to_dict(),
        "about": about(snapshot),
        "shown": [_shown(worker) for worker in snapshot.workers],
        "arrows": _arrows(snapshot.edges, drawing),
    }


def _shown(worker: WorkerSample) -> dict[str, object]:
    state = state_of(worker)
    calls = f"{rate(worker.calls_per_s)} calls/s" if worker.methods else ""
    makes = f"makes {rate(worker.made_per_s)}/s" if worker.made_per_s else ""
    return {
        "name": worker.name,
        "state": state,
        "notes": [
            f"{state}, restart {worker.restarts}" if worker.restarts else state,
            calls or makes,
        ],
        "rows": [
            [row.get(column, "") for column in COLUMNS] for row in rows_of(worker)
        ],
        "error": worker.error,
    }


def _arrows(edges: Sequence[EdgeSample], drawing: Drawing) -> list[dict[str, object]]:
    """Return the traffic of each arrow, which may stand for many edges."""
    by_pair = {(edge.source, edge.target): edge for edge in edges}
    arrows = []
    for arrow, _ in drawing.arrows:
        pairs = dict.fromkeys((edge.source, edge.target) for edge in arrow.edges)
        met = [by_pair[pair] for pair in pairs if pair in by_pair]
        calls_per_s = sum(edge.calls_per_s for edge in met)
        bytes_per_s = sum(edge.bytes_per_s for edge in met)
        traffic = [f"{rate(calls_per_s)}/s"] if calls_per_s else []
        traffic += [f"{size(bytes_per_s)}/s"] if traffic and bytes_per_s else []
        arrows.append({"calls_per_s": calls_per_s, "text": " · ".join(traffic)})
    return arrows
