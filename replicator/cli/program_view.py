"""A running program as lines of a terminal: which rows, and how numbers are written."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from replicator.launchpad_bridge.view.watching.samples import (
    MethodSample,
    Snapshot,
    WorkerSample,
)

Row: TypeAlias = tuple[str, ...]

HEADER = (
    "node",
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
RIGHT = HEADER[2:]
_NOTHING = "-"


def rows_of(snapshot: Snapshot, room: int | None = None) -> list[Row]:
    """Return a row for each worker, and below it for its methods if it has several.

    Args:
      snapshot: The program.
      room: How many rows there may be. Where all are too many, methods are left out;
        then workers of one group become one row.
    """
    workers = snapshot.workers
    rows = [row for worker in workers for row in [_row(worker), *_method_rows(worker)]]
    if room is None or len(rows) <= room:
        return rows
    rows = [_row(worker) for worker in workers]
    if len(rows) <= room:
        return rows
    groups: dict[str, list[WorkerSample]] = {}
    for worker in workers:
        groups.setdefault(worker.label, []).append(worker)
    return [_group_row(label, group) for label, group in groups.items()]


def told_above(snapshot: Snapshot) -> str:
    """Return the line above the table: which program this is."""
    count = len(snapshot.workers)
    nodes = f"{count} node" if count == 1 else f"{count} nodes"
    since = [worker.since_s for worker in snapshot.workers if worker.since_s]
    age = f", for {duration(snapshot.at_s - min(since))}" if since else ""
    stopped = f" (asked by {snapshot.stopped_by})" if snapshot.stopped_by else ""
    return (
        f"{snapshot.program}: {snapshot.phase}{stopped}, {nodes}{age}, launched by "
        f"process {snapshot.pid}"
    )


def told_below(snapshot: Snapshot) -> str:
    """Return the line below the table: what went wrong; "" for nothing."""
    if snapshot.failure:
        return f"failed: {snapshot.failure}"
    errors = [w.error for w in snapshot.workers if w.state == "waiting" and w.error]
    return f"last: {errors[-1]}" if errors else ""


def told_end(snapshot: Snapshot) -> str:
    """Say how a program ended."""
    if snapshot.failure:
        return f"{snapshot.program} failed: {snapshot.failure}"
    if snapshot.stopped_by:
        return f"{snapshot.program} was stopped by {snapshot.stopped_by}."
    if snapshot.workers and all(worker.outcome for worker in snapshot.workers):
        return f"{snapshot.program} ended: all nodes have returned."
    return f"{snapshot.program} ended."


def duration(seconds: float) -> str:
    """Write a time in the unit that fits: `12 µs`, `3.4 ms`, `1.2 s`, `5 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count_bytes: float) -> str:
    """Write a number of bytes: `512 B`, `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{_three(count_bytes)} {unit}"
        count_bytes /= 1000
    return f"{_three(count_bytes)} TB"


def rate(per_s: float) -> str:
    """Write how often in a second: `0`, `0.5`, `12.3`, `45,678`."""
    return f"{per_s:,.0f}" if per_s >= 100 else _three(per_s)


def _three(number: float) -> str:
    """Write three digits of a number below a thousand."""
    if not number:
        return "0"
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _row(worker: WorkerSample) -> Row:
    state = (
        worker.outcome if worker.state == "ended" and worker.outcome else worker.state
    )
    made = rate(worker.made_per_s) if worker.made_per_s else _NOTHING
    counts = (worker.name, state, str(worker.restarts), made)
    if not worker.methods:
        silent = worker.answers is False and worker.state == "running"
        return (*counts, "no answer" if silent else _NOTHING, *[_NOTHING] * 5)
    return (*counts, *_numbers(worker))


def _method_rows(worker: WorkerSample) -> list[Row]:
    called = {name: method for name, method in worker.methods.items() if method.calls}
    if len(called) < 2:
        return []
    return [
        (f"  {name}", "", "", "", *_numbers(method)) for name, method in called.items()
    ]


def _numbers(of: WorkerSample | MethodSample) -> Row:
    return (
        rate(of.calls_per_s),
        duration(of.p50_s) if of.p50_s else _NOTHING,
        duration(of.p99_s) if of.p99_s else _NOTHING,
        size(of.bytes_per_s),
        str(of.queued),
        str(of.running),
    )


def _group_row(label: str, group: Sequence[WorkerSample]) -> Row:
    if len(group) == 1:
        return _row(group[0])
    serving = [worker for worker in group if worker.methods]
    counts = (
        f"{label} ({len(group)} nodes)",
        _states(group),
        str(sum(worker.restarts for worker in group)),
        rate(sum(worker.made_per_s for worker in group)),
    )
    if not serving:
        return (*counts, *[_NOTHING] * 6)
    return (
        *counts,
        rate(sum(worker.calls_per_s for worker in serving)),
        duration(statistics.median(worker.p50_s for worker in serving)),
        duration(max(worker.p99_s for worker in serving)),
        size(sum(worker.bytes_per_s for worker in serving)),
        str(sum(worker.queued for worker in serving)),
        str(sum(worker.running for worker in serving)),
    )


def _states(group: Iterable[WorkerSample]) -> str:
    counts = Counter(
        worker.outcome if worker.state == "ended" else worker.state for worker in group
    )
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {state}" for state, count in counts.items())
