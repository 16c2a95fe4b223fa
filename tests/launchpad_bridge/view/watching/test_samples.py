import dataclasses
import json

import pytest

from replicator.launchpad_bridge.view.watching.journal import RunNote, WorkerNote
from replicator.launchpad_bridge.view.watching.samples import (
    Counts,
    ProgramSample,
    edges_of,
    workers_of,
)
from replicator.monitoring.drawing.graph import Graph, GraphEdge, Vertex
from replicator.rpc.call_statistics import (
    CallerStatistics,
    MethodStatistics,
    ServerStatistics,
)

GRAPH = Graph(
    program="p",
    vertices=[
        Vertex(name="server", label="server", kind="CourierNode", text="Server"),
        Vertex(name="actor", label="actor", kind="PyNode", text="act"),
    ],
    edges=[
        GraphEdge(source="actor", target="server", argument=f"args[{i}]")
        for i in range(2)
    ],
)
NOTE = RunNote(
    phase="running",
    workers={
        "server": WorkerNote(phase="running", restarts=2, since_s=7.0),
        "actor": WorkerNote(phase="ended", restarts=0, since_s=7.0, outcome="died"),
    },
)


def method(calls, **more):
    known = {"errors": 0, "p50_s": 0.0, "p99_s": 0.0, "bytes_in": 0, "bytes_out": 0}
    return MethodStatistics(calls=calls, **{**known, **more})


def counts(at_s, callers=None, **methods):
    server = ServerStatistics(
        methods=methods,
        connections=1,
        queued=0,
        running=0,
        pool_size=16,
        refused=0,
        callers=callers or {},
    )
    return Counts(at_s=at_s, servers={"server": [server]})


def server(before, now):
    return workers_of(GRAPH, NOTE, before or now, now)[0]


def test_rates_are_of_the_time_between_two_looks():
    before = counts(10.0, add=method(100, bytes_in=1000, bytes_out=500))
    sample = server(before, counts(12.0, add=method(300, bytes_in=3000, bytes_out=700)))
    assert (sample.calls_per_s, sample.bytes_per_s) == (100.0, 1100.0)
    assert sample.methods["add"].calls == 300


def test_the_first_look_knows_no_rates():
    sample = server(None, counts(12.0, add=method(300, bytes_in=3000)))
    assert (sample.calls_per_s, sample.bytes_per_s) == (0, 0)


def test_a_server_that_was_started_again_counts_from_zero():
    sample = server(counts(0.0, add=method(900)), counts(2.0, add=method(30)))
    assert sample.calls_per_s == 15.0


def test_times_are_those_of_the_busiest_method():
    before = counts(0.0, slow=method(0), quick=method(0))
    slow, quick = method(1, p50_s=9.0, p99_s=9.0), method(5, p50_s=1.0, p99_s=2.0)
    sample = server(before, counts(1.0, slow=slow, quick=quick))
    assert (sample.p50_s, sample.p99_s) == (1.0, 2.0)


def test_what_waits_and_runs_is_added_up():
    methods = {"a": method(0, queued=2, running=1), "b": method(0, queued=3, running=4)}
    sample = server(None, counts(1.0, **methods))
    assert (sample.queued, sample.running) == (5, 5)


def test_states_are_those_of_the_supervisor():
    now = counts(1.0, add=method(1))
    samples = workers_of(GRAPH, NOTE, now, now)
    assert [(s.state, s.outcome, s.restarts) for s in samples] == [
        ("running", "", 2),
        ("ended", "died", 0),
    ]


@pytest.mark.parametrize(
    ("servers", "answers"), [({}, None), ({"server": [None]}, False)]
)
def test_a_server_that_is_silent_is_told_from_none(servers, answers):
    sample = server(None, Counts(at_s=1.0, servers=servers))
    assert sample.answers is answers
    assert sample.methods == {}


def test_a_worker_with_two_servers_shows_the_methods_of_both():
    both = [
        server
        for n in (1, 2)
        for server in counts(0.0, add=method(n)).servers["server"]
    ]
    sample = server(None, Counts(at_s=1.0, servers={"server": both}))
    assert {name: m.calls for name, m in sample.methods.items()} == {
        "add": 1,
        "add (1)": 2,
    }


def test_the_traffic_of_an_edge_is_what_its_source_called():
    def seen(at_s, calls):
        called = CallerStatistics(calls=calls, bytes_in=10 * calls, bytes_out=calls)
        stranger = CallerStatistics(calls=999)
        return counts(at_s, {"actor": called, "stranger": stranger}, add=method(calls))

    (edge,) = edges_of(GRAPH, seen(1.0, 100), seen(3.0, 300))
    workers = workers_of(GRAPH, NOTE, seen(1.0, 100), seen(3.0, 300))
    assert [worker.made_per_s for worker in workers] == [0.0, 100.0]
    assert (edge.source, edge.target, edge.calls) == ("actor", "server", 300)
    assert (edge.calls_per_s, edge.bytes_per_s) == (100.0, 1100.0)


def test_a_snapshot_is_plain_data():
    now = counts(1.0, add=method(1))
    snapshot = ProgramSample(
        program="p",
        run_id="r",
        pid=1,
        at_s=2.0,
        phase="running",
        failure="",
        stopped_by="",
        workers=workers_of(GRAPH, NOTE, now, now),
        edges=edges_of(GRAPH, now, now),
    )
    assert json.loads(snapshot.to_json()) == json.loads(
        json.dumps(dataclasses.asdict(snapshot))
    )
