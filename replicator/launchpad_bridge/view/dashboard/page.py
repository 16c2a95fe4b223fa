"""The page: the program's picture, drawn here, and a table that its script fills."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from replicator.launchpad_bridge.view.drawing.layout import Layout
from replicator.launchpad_bridge.view.drawing.svg import svg_of
from replicator.launchpad_bridge.view.watching.samples import EdgeSample, Snapshot

_ROOM = "replicator.launchpad_bridge.view.dashboard"
NOTE_LINES = 2
"""Below a worker's name: its state, and what it serves."""
COLUMNS = (
    "node",
    "runs",
    "state",
    "restarts",
    "made/s",
    "calls/s",
    "p50",
    "p99",
    "bytes/s",
    "queue",
    "busy",
)


def page_of(layout: Layout) -> bytes:
    """Return the page of a program as HTML; names in it are text."""
    name = escape(layout.graph.program)
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
{svg_of(layout)}</figure>
<table id="workers"><thead><tr>{columns}</tr></thead><tbody></tbody></table>
</body>
</html>
""".encode()


def asset(name: str) -> bytes:
    """Return our script, or our style sheet."""
    return resources.files(_ROOM).joinpath(name).read_bytes()


def event_of(snapshot: Snapshot, layout: Layout) -> dict[str, object]:
    """Return what the page's script is told: the sample, and the traffic by arrow."""
    return {**snapshot.to_dict(), "arrows": _arrows(snapshot.edges, layout)}


def _arrows(edges: Sequence[EdgeSample], layout: Layout) -> list[dict[str, float]]:
    """Return calls and bytes a second of each arrow, which may stand for many edges."""
    by_pair = {(edge.source, edge.target): edge for edge in edges}
    arrows = []
    for arrow, _ in layout.arrows:
        pairs = dict.fromkeys((edge.source, edge.target) for edge in arrow.edges)
        met = [by_pair[pair] for pair in pairs if pair in by_pair]
        arrows.append(
            {
                "calls_per_s": sum(edge.calls_per_s for edge in met),
                "bytes_per_s": sum(edge.bytes_per_s for edge in met),
            }
        )
    return arrows
