"""Columns of a running program's table, in a terminal and on its web page.

A row is text by column; a column that it lacks is empty.
"""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from replicator.launchpad_bridge.view.watching.samples import (
    MethodSample,
    ProgramSample,
    WorkerSample,
)

Row: TypeAlias = dict[str, str]

_CALLS: tuple[str, ...] = ("calls/s", "p50", "p99", "bytes/s", "queue", "busy")
COLUMNS = ("node", "runs", "state", "restarts", "made/s", *_CALLS)
_NOTHING = "-"


def rows_of(worker: WorkerSample) -> list[Row]:
    """Return the row of a worker, then those of its methods if it has several."""
    called = {name: method for name, method in worker.methods.items() if method.calls}
    methods = [{"node": name, **_numbers(method)} for name, method in called.items()]
    return [row_of(worker), *(methods if len(methods) > 1 else [])]


def row_of(worker: WorkerSample) -> Row:
    """Return the row of a worker."""
    calls = _numbers(worker) if worker.methods else dict.fromkeys(_CALLS, _NOTHING)
    if not worker.methods and worker.answers is False and worker.state == "running":
        calls["calls/s"] = "no answer"
    return {
        "node": worker.name,
        "runs": worker.text,
        "state": state_of(worker),
        "restarts": str(worker.restarts),
        "made/s": rate(worker.made_per_s) if worker.made_per_s else _NOTHING,
        **calls,
    }


def merged(label: str, group: Sequence[WorkerSample]) -> WorkerSample:
    """Return the workers of a group as one, which stands for all of them."""
    if len(group) == 1:
        return group[0]
    serving = [worker for worker in group if worker.methods]
    return dataclasses.replace(
        (serving or group)[0],
        name=f"{label} ({len(group)} nodes)",
        state=_counted(map(state_of, group)),
        restarts=sum(worker.restarts for worker in group),
        made_per_s=sum(worker.made_per_s for worker in group),
        calls_per_s=sum(worker.calls_per_s for worker in serving),
        bytes_per_s=sum(worker.bytes_per_s for worker in serving),
        p50_s=statistics.median(worker.p50_s for worker in serving or group),
        p99_s=max(worker.p99_s for worker in serving or group),
        queued=sum(worker.queued for worker in serving),
        running=sum(worker.running for worker in serving),
        answers=None,
    )


def state_of(worker: WorkerSample) -> str:
    """Return the state of a worker; of one that has ended, the outcome."""
    is_over = worker.state == "ended" and worker.outcome
    return worker.outcome if is_over else worker.state


def about(snapshot: ProgramSample) -> str:
    """Return size, age and launcher of a program: `2 nodes, for 12 s, ...`."""
    count = len(snapshot.workers)
    nodes = f"{count} node" if count == 1 else f"{count} nodes"
    since = [worker.since_s for worker in snapshot.workers if worker.since_s]
    age = f", for {duration(snapshot.at_s - min(since))}" if since else ""
    return f"{nodes}{age}, launched by process {snapshot.pid}"


def duration(seconds: float) -> str:
    """Write a time in the unit that fits.

    >>> [duration(seconds) for seconds in (12e-6, 0.0034, 1.2, 300)]
    ['12 µs', '3.40 ms', '1.20 s', '5 min']
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{_three(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count_bytes: float) -> str:
    """Write a number of bytes.

    >>> size(512), size(1.2e6)
    ('512 B', '1.20 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{_three(count_bytes)} {unit}"
        count_bytes /= 1000
    return f"{_three(count_bytes)} TB"


def rate(per_s: float) -> str:
    """Write a number of times per second.

    >>> rate(0), rate(0.5), rate(12.34), rate(45678)
    ('0', '0.50', '12.3', '45,678')
    """
    return f"{per_s:,.0f}" if per_s >= 100 else _three(per_s)


def _three(number: float) -> str:
    """Write three digits of a number below a thousand."""
    if not number:
        return "0"
    return f"{number:.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def _numbers(sample: WorkerSample | MethodSample) -> Row:
    return {
        "calls/s": rate(sample.calls_per_s),
        "p50": duration(sample.p50_s) if sample.p50_s else _NOTHING,
        "p99": duration(sample.p99_s) if sample.p99_s else _NOTHING,
        "bytes/s": size(sample.bytes_per_s),
        "queue": str(sample.queued),
        "busy": str(sample.running),
    }


def _counted(states: Iterable[str]) -> str:
    counts = Counter(states)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {state}" for state, count in counts.items())
