"""The parts of the page that are text: head, goodput, events, tables."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicator.cli.look.report_page import formats
from replicator.cli.look.report_page.checkpoints import CheckpointLine
from replicator.cli.look.report_page.curves import MetricCurve, training_s
from replicator.cli.look.report_page.markup import Markup, element
from replicator.cli.look.report_page.run_files import LeftFile, RunFiles
from replicator.monitoring.goodput import Goodput

# Kinds of events that are shown first; `saved` and the like are the rest.
BAD_KINDS = frozenset({"save_failed", "hung", "rolled_back"})
ODD_KINDS = frozenset({"preempted", "resumed", "skipped", "spike", "straggler"})
_QUIET_KINDS = frozenset({"phases"})
_OWN_FIELDS = frozenset({"time", "kind", "step", "process", "session", "uptime_s"})
_MOST_EVENTS = 2000


def head(run: RunFiles) -> Markup:
    """Return the title: the run, its machine, how it ended."""
    record = run.record
    devices = record.get("devices")
    first = run.events[0].get("time") if run.events else record.get("started_at")
    about = [record.get("host"), _on(devices), _when(first)]
    command = record.get("argv")
    label, tone = outcome(run.events)
    return element(
        "header",
        element("h1", run.directory.resolve().name, element_badge(label, tone)),
        element("p", " · ".join(str(part) for part in about if part), class_="sub"),
        element("p", element("code", " ".join(map(str, command))), class_="sub")
        if isinstance(command, list)
        else None,
    )


def element_badge(label: str, tone: str) -> Markup:
    """Return a label in a box of a colour: good, odd, bad or plain.

    >>> element_badge("finished", "good")
    '<span class="badge good">finished</span>'
    """
    return element("span", label, class_=f"badge {tone}")


def outcome(events: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return how a run ended, and the tone of its label, by the last such event.

    >>> outcome([])
    ('no end recorded', 'plain')
    """
    telling = {"ended": "good", "preempted": "odd", "hung": "bad"}
    for event in reversed(events):
        kind = str(event.get("kind"))
        if kind in ("started", "resumed"):
            break
        if kind in telling:
            failed = event.get("error") or event.get("failure")
            return ("failed", "bad") if failed else (kind, telling[kind])
    return ("no end recorded", "plain")


def tiles(
    run: RunFiles, curves: Sequence[MetricCurve], goodput: Goodput | None
) -> Markup:
    """Return the most important numbers."""
    arguments = run.record.get("arguments")
    wanted = arguments.get("steps") if isinstance(arguments, Mapping) else None
    done = max((row.step for row in run.rows), default=0)
    facts = [("steps", f"{done:,}" + (f" of {wanted:,}" if _is_int(wanted) else ""))]
    last = {curve.name: curve.last for curve in curves}
    for name, label in _TOLD:
        if name in last:
            facts.append((label, formats.number(last[name])))
    if seconds := training_s(run.rows):
        facts.append(("trained for", formats.duration(seconds[-1])))
    if goodput is not None:
        facts.append(("goodput", formats.share(goodput.share)))
    kinds = Counter(str(event.get("kind")) for event in run.events)
    facts += [(label, str(kinds[kind])) for kind, label in _COUNTED if kinds[kind]]
    boxes = [
        element("div", element("b", value), element("span", label), class_="tile")
        for label, value in facts
    ]
    return element("section", *boxes, class_="tiles")


_TOLD = (
    ("loss", "last loss"),
    ("progress/examples_per_s", "examples/s"),
    ("progress/mfu", "model-flops utilisation"),
)
_COUNTED = (("saved", "saves"), ("resumed", "times resumed"), ("skipped", "skipped"))


def problems(run: RunFiles) -> Markup | None:
    """Return the list of files that could not be read; None if all could."""
    if not run.problems:
        return None
    items = [element("li", problem) for problem in run.problems]
    return element("ul", *items, class_="problems")


def goodput_bar(goodput: Goodput | None) -> Markup:
    """Return one bar for the whole time of the run, cut by phase."""
    if goodput is None:
        return _section("Where the time went", _none("not recorded"))
    lost = sorted(goodput.lost_s.items(), key=lambda item: -item[1])
    parts, legend = [], []
    for index, (label, seconds) in enumerate([("steps", goodput.useful_s), *lost]):
        part = seconds / goodput.wall_s
        tone = f"part-{min(index, _MOST_TONES)}"
        text = f"{label} {formats.share(part)} ({formats.duration(seconds)})"
        style = f"flex-grow:{part:.6f}"
        parts.append(element("div", class_=tone, style=style, title=text))
        legend.append(element("li", element("i", class_=tone), text))
    return _section(
        "Where the time went",
        element("div", *parts, class_="bar"),
        element("ul", *legend, class_="legend"),
    )


_MOST_TONES = 8


def events(found: Sequence[Mapping[str, Any]]) -> Markup:
    """Return the journal as a table, with a box to tick for each kind."""
    kinds = Counter(str(event.get("kind")) for event in found)
    boxes = [
        element(
            "label",
            element("input", type="checkbox", data_kind=kind, checked=_is_shown(kind)),
            f" {kind} {count}",
        )
        for kind, count in sorted(kinds.items())
    ]
    several = len({str(event.get("process")) for event in found}) > 1
    shown = list(found)[-_MOST_EVENTS:]
    rows = [_event_row(event, several=several) for event in shown]
    left_out = len(found) - len(shown)
    note = f"The first {left_out:,} are in the journal only." if left_out else None
    names = [
        "time (UTC)",
        *(["process"] if several else []),
        "step",
        "event",
        "details",
    ]
    return _section(
        "Events",
        element("p", *boxes, class_="kinds") if boxes else _none("none recorded"),
        element("p", note, class_="sub") if note else None,
        _table(names, rows, class_="events") if rows else None,
    )


def environment(record: Mapping[str, Any]) -> Markup:
    """Return the machine and the versions of the run."""
    names = ("started_at", "host", "seed", "devices", "versions", "git")
    return _pairs("Environment", {name: record.get(name) for name in names})


def arguments(record: Mapping[str, Any]) -> Markup:
    """Return what the run was text, its strategy apart."""
    given = record.get("arguments")
    given = dict(given) if isinstance(given, Mapping) else {}
    given.pop("strategy", None)
    choice = given.pop("choice", None)
    if isinstance(choice, Mapping):  # without the table of those not chosen
        given["chosen"] = choice.get("chosen")
    return _pairs("Arguments", given)


def strategy(record: Mapping[str, Any]) -> Markup | None:
    """Return the strategy, if one was recorded."""
    given = record.get("arguments")
    below = given.get("strategy") if isinstance(given, Mapping) else None
    found = record.get("strategy") or below
    return _pairs("Strategy", found) if found else None


def checkpoints(lines: Sequence[CheckpointLine]) -> Markup:
    """Return the checkpoints as a table, or a line if there are none."""
    if not lines:
        return _section("Checkpoints", _none("none known"))
    kept = [line for line in lines if line.state != "removed"]
    rows = [
        element(
            "tr",
            _cell(f"{line.step:,}", class_="n"),
            _cell(line.state, class_="bad" if line.state == "damaged" else None),
            _cell(formats.size(line.size_bytes or 0), class_="n"),
            _cell(formats.clock(line.time)),
        )
        for line in kept
    ]
    removed = len(lines) - len(kept)
    note = f"{removed:,} older ones were saved and removed since." if removed else None
    return _section(
        "Checkpoints",
        _table(("step", "state", "size", "saved at (UTC)"), rows) if rows else None,
        element("p", note, class_="sub") if note else None,
    )


def left_files(files: Sequence[LeftFile]) -> Markup | None:
    """Return post-mortems and stack dumps; texts can be opened in place."""
    if not files:
        return None
    items = []
    for file in files:
        text = f"{file.path} ({formats.size(file.size_bytes)})"
        if file.text:
            text = element(
                "details", element("summary", text), element("pre", file.text)
            )
        items.append(element("li", text))
    return _section("Post-mortems and stacks", element("ul", *items, class_="files"))


def _pairs(title: str, value: Any) -> Markup:
    rows = [
        element("tr", element("th", name), _cell(text))
        for name, text in formats.flat(value)
        if name or text
    ]
    body = _table((), rows, class_="pairs") if rows else _none("not recorded")
    return _section(title, body)


def _section(title: str, *children: Markup | None) -> Markup:
    return element("section", element("h2", title), *children)


def _none(text: str) -> Markup:
    return element("p", text, class_="sub")


def _table(names: Sequence[str], rows: Iterable[Markup], *, class_: str = "") -> Markup:
    header = element("tr", *[_column(name) for name in names])
    return element(
        "div",
        element(
            "table",
            element("thead", header) if names else None,
            element("tbody", *rows),
            class_=class_ or None,
        ),
        class_="scroll",
    )


def _column(name: str) -> Markup:
    return element("th", name, class_="n" if name in ("step", "size") else None)


def _event_row(event: Mapping[str, Any], *, several: bool) -> Markup:
    kind = str(event.get("kind"))
    fields = {name: value for name, value in event.items() if name not in _OWN_FIELDS}
    text = " · ".join(
        f"{name} {formats.one_line(value)}" for name, value in fields.items()
    )
    step = event.get("step")
    return element(
        "tr",
        _cell(formats.clock(event.get("time"))),
        _cell(event.get("process", "")) if several else None,
        _cell(f"{step:,}" if _is_int(step) else "", class_="n"),
        _cell(kind, class_=tone_of(kind)),
        _cell(text, class_="details"),
        data_kind=kind,
        hidden=not _is_shown(kind),
    )


def tone_of(kind: str) -> str:
    """Return the tone (a class of colours) of a kind of event.

    >>> tone_of("resumed")
    'odd'
    """
    return "bad" if kind in BAD_KINDS else "odd" if kind in ODD_KINDS else "plain"


def _is_shown(kind: str) -> bool:
    return kind not in _QUIET_KINDS


def _cell(value: object, *, class_: str | None = None) -> Markup:
    return element("td", value, class_=class_)


def _when(time: Any) -> str:
    return f"started {formats.clock(time)} UTC" if time else ""


def _on(devices: Any) -> str:
    if not isinstance(devices, Mapping):
        return ""
    count, processes = devices.get("count"), devices.get("processes")
    several = f" in {processes} processes" if processes not in (None, 1) else ""
    return f"{count} x {devices.get('kind')}{several}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
