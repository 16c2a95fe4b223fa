"""Samples of a running program as plain data, computed from counts of its servers.

Servers count calls and bytes since they started; a sample holds the rates of growth
between two looks. Pure: counts in, a `ProgramSample` out.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replicator.launchpad_bridge.view.watching.journal import RunNote, WorkerNote
from replicator.monitoring.drawing.graph import Graph, GraphEdge, Vertex
from replicator.rpc.call_statistics import MethodStatistics, ServerStatistics

NOT_STARTED = WorkerNote(phase="starting", restarts=0, since_s=0.0)
_NOTHING = MethodStatistics(
    calls=0, errors=0, p50_s=0.0, p99_s=0.0, bytes_in=0, bytes_out=0
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MethodSample:
    """A method of a worker.

    Attributes:
      calls: Number of calls that ended since its server started.
      errors: Number of them that raised.
      calls_per_s: Rate of calls since the last look.
      bytes_per_s: Rate of bytes of arguments and results since the last look.
      p50_s: Median time in the method, over its last 1,024 calls.
      p99_s: 99th percentile of these times.
      queued: Number of calls that wait now.
      running: Number of calls that run now.
    """

    calls: int
    errors: int
    calls_per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float
    queued: int
    running: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSample:
    """A worker.

    Attributes:
      name: "label", or "label/index".
      label: Label of its group.
      kind: Type of its node.
      text: Function or class that it runs.
      state: The supervisor's state: "running", "waiting" for its restart, "ended".
      outcome: Outcome of the last end, as in `Exited`; "" before the first.
      restarts: Number of restarts.
      since_s: Time of the last start, in seconds since 1970.
      error: Error of the last end; "" for none.
      answers: Whether its server answered; None for a worker that has none.
      made_per_s: Rate of calls made along its edges, since the last look.
      calls_per_s: Rate of calls served since the last look.
      bytes_per_s: Rate of bytes of their arguments and results.
      p50_s: Median time of the method with most calls since the last look (at the
        first: since its start).
      p99_s: 99th percentile of the same.
      queued: Number of calls that wait now.
      running: Number of calls that run now.
      methods: Samples of the methods, by name.
    """

    name: str
    label: str
    kind: str
    text: str
    state: str
    outcome: str
    restarts: int
    since_s: float
    error: str
    answers: bool | None
    made_per_s: float
    calls_per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float
    queued: int
    running: int
    methods: Mapping[str, MethodSample]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSample:
    """The traffic from one worker to another.

    Attributes:
      source: Name of the caller.
      target: Name of the worker that is called.
      calls: Number of calls since the server started.
      calls_per_s: Rate of calls since the last look.
      bytes_per_s: Rate of bytes since the last look.
    """

    source: str
    target: str
    calls: int
    calls_per_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSample:
    """A program at one moment.

    Attributes:
      program: Name of the program.
      run_id: Unique id of the run.
      pid: Process that launched it.
      at_s: Time of the sample, in seconds since 1970.
      phase: "starting", "running", "stopping", "killing" or "ended".
      failure: First failure; "" for none.
      stopped_by: Worker that asked for the stop; "" for none.
      workers: Samples of the workers, in the order in which they were added.
      edges: Samples of the edges, each pair of workers once.
    """

    program: str
    run_id: str
    pid: int
    at_s: float
    phase: str
    failure: str
    stopped_by: str
    workers: Sequence[WorkerSample]
    edges: Sequence[EdgeSample]

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as plain values."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Return the sample as one line of JSON."""
        return json.dumps(self.to_dict())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of all servers at one moment.

    Attributes:
      at_s: Time, on a clock that never jumps.
      servers: Counts of each worker's servers; None for one that did not answer.
    """

    at_s: float
    servers: Mapping[str, Sequence[ServerStatistics | None]]


def workers_of(
    graph: Graph, note: RunNote, before: Counts, now: Counts
) -> list[WorkerSample]:
    """Return a sample of each worker.

    Args:
      graph: Graph of the program.
      note: State of the run in its journal.
      before: Counts of the look before; at the first look, the same as `now`.
      now: Counts of this look.
    """
    made: dict[str, float] = {}
    for edge in edges_of(graph, before, now):
        made[edge.source] = made.get(edge.source, 0.0) + edge.calls_per_s
    return [
        _worker(vertex, note, before, now, made.get(vertex.name, 0.0))
        for vertex in graph.vertices
    ]


def edges_of(graph: Graph, before: Counts, now: Counts) -> list[EdgeSample]:
    """Return the traffic of each edge; arguments as for `workers_of`."""
    return [
        _edge(source, target, before, now)
        for source, target in dict.fromkeys((e.source, e.target) for e in graph.edges)
    ]


def graph_of_description(described: Mapping[str, Any]) -> Graph:
    """Return the graph in the description of a run.

    >>> worker = {"name": "a", "label": "a", "kind": "PyNode", "text": "f", "index": 0}
    >>> described = {"program": "sum", "workers": [worker], "edges": []}
    >>> graph_of_description(described).vertices
    [Vertex(name='a', label='a', kind='PyNode', text='f')]
    """
    return Graph(
        program=described["program"],
        vertices=[
            Vertex(**{key: worker[key] for key in ("name", "label", "kind", "text")})
            for worker in described["workers"]
        ],
        edges=[GraphEdge(**edge) for edge in described["edges"]],
    )


def _worker(
    vertex: Vertex,
    note: RunNote,
    before: Counts,
    now: Counts,
    made_per_s: float,
) -> WorkerSample:
    noted = note.workers.get(vertex.name, NOT_STARTED)
    servers = now.servers.get(vertex.name, ())
    known = _methods(servers)
    earlier = _methods(before.servers.get(vertex.name, ()))
    seconds = now.at_s - before.at_s
    methods = {
        name: _method(known[name], earlier.get(name, _NOTHING), seconds)
        for name in sorted(known)
    }
    idle = _method(_NOTHING, _NOTHING, 0.0)
    busiest = max(
        methods.values(), key=lambda m: (m.calls_per_s, m.calls), default=idle
    )
    return WorkerSample(
        name=vertex.name,
        label=vertex.label,
        kind=vertex.kind,
        text=vertex.text,
        state=noted.phase,
        outcome=noted.outcome,
        restarts=noted.restarts,
        since_s=noted.since_s,
        error=noted.error,
        answers=None if not servers else all(s is not None for s in servers),
        made_per_s=made_per_s,
        calls_per_s=sum(method.calls_per_s for method in methods.values()),
        bytes_per_s=sum(method.bytes_per_s for method in methods.values()),
        p50_s=busiest.p50_s,
        p99_s=busiest.p99_s,
        queued=sum(method.queued for method in methods.values()),
        running=sum(method.running for method in methods.values()),
        methods=methods,
    )


def _methods(
    servers: Iterable[ServerStatistics | None],
) -> dict[str, MethodStatistics]:
    """Return the methods of a worker, which may have several servers."""
    found: dict[str, MethodStatistics] = {}
    for number, server in enumerate(servers):
        for name, method in {} if server is None else server.methods.items():
            found[name if name not in found else f"{name} ({number})"] = method
    return found


def _method(
    now: MethodStatistics, before: MethodStatistics, seconds: float
) -> MethodSample:
    total, was = now.bytes_in + now.bytes_out, before.bytes_in + before.bytes_out
    return MethodSample(
        calls=now.calls,
        errors=now.errors,
        calls_per_s=_rate(now.calls, before.calls, seconds),
        bytes_per_s=_rate(total, was, seconds),
        p50_s=now.p50_s,
        p99_s=now.p99_s,
        queued=now.queued,
        running=now.running,
    )


def _edge(source: str, target: str, before: Counts, now: Counts) -> EdgeSample:
    calls, total = _traffic(now, source, target)
    calls_before, was = _traffic(before, source, target)
    seconds = now.at_s - before.at_s
    return EdgeSample(
        source=source,
        target=target,
        calls=calls,
        calls_per_s=_rate(calls, calls_before, seconds),
        bytes_per_s=_rate(total, was, seconds),
    )


def _traffic(counts: Counts, source: str, target: str) -> tuple[int, int]:
    """Return calls and bytes, so far."""
    servers = counts.servers.get(target, ())
    met = [s.callers[source] for s in servers if s is not None and source in s.callers]
    return sum(c.calls for c in met), sum(c.bytes_in + c.bytes_out for c in met)


def _rate(now: int, before: int, seconds: float) -> float:
    """Return the growth of a count per second; a smaller one is of a new server."""
    if seconds <= 0:
        return 0.0
    return (now - before if now >= before else now) / seconds
