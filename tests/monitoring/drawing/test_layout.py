import itertools
import random
import re
from time import thread_time

import numpy as np
import pytest

from replicator.launchpad_bridge.graph import graph_of
from replicator.monitoring.drawing.boxes import Box
from replicator.monitoring.drawing.graph import Graph, GraphEdge, Vertex
from replicator.monitoring.drawing.layout import lay_out
from tests.monitoring.drawing.programs_to_draw import (
    SHAPES,
    forty,
    rows,
    training,
)


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.__name__)
def layout(request):
    return lay_out(graph_of(request.param()))


def overlap(a, b):
    return (
        a.x < b.x + b.width
        and b.x < a.x + a.width
        and a.y < b.y + b.height
        and b.y < a.y + a.height
    )


def is_inside(inner, outer):
    return (
        inner.x >= outer.x
        and inner.y >= outer.y
        and inner.x + inner.width <= outer.x + outer.width
        and inner.y + inner.height <= outer.y + outer.height
    )


def test_every_worker_stands_once_and_no_two_overlap(layout):
    names = [worker.vertex.name for worker in layout.workers]
    assert sorted(names) == sorted(vertex.name for vertex in layout.graph.vertices)
    for one, other in itertools.combinations(layout.workers, 2):
        assert not overlap(one.box, other.box), (one.vertex.name, other.vertex.name)


def test_a_group_holds_its_own_workers_and_nobody_else(layout):
    for group in layout.groups:
        for worker in layout.workers:
            if worker.vertex.label == group.label:
                assert is_inside(worker.box, group.box)
            else:
                assert not overlap(worker.box, group.box)
    for one, other in itertools.combinations(layout.groups, 2):
        assert not overlap(one.box, other.box)


def test_all_is_within_the_picture(layout):
    for thing in [*layout.workers, *layout.groups]:
        box = thing.box
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= layout.width
        assert box.y + box.height <= layout.height


def points_of(path):
    """Return points along a path, close together."""
    pieces = re.findall(r"([MCL])([^MCL]*)", path)
    at = None
    for kind, numbers in pieces:
        xy = np.array([float(n) for n in numbers.split()]).reshape(-1, 2)
        if kind == "C":
            t = np.linspace(0, 1, 101)[:, None]
            corners = [at, *xy]
            weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3]
            yield from sum(w * c for w, c in zip(weights, corners, strict=True))
        at = xy[-1]
        yield at


@pytest.mark.parametrize("note_lines", [0, 3])
def test_all_arrows_are_within_the_picture_also_one_to_its_own_node(note_lines):
    vertices = [
        Vertex(name=name, label=name, kind="PyNode", text="f") for name in ("a", "b")
    ]
    edges = [
        GraphEdge(source=source, target=target, argument="x")
        for source, target in [("a", "a"), ("a", "b"), ("b", "a")]
    ]
    for chosen in (edges[:1], edges[1:]):
        graph = Graph(program="p", vertices=vertices, edges=chosen)
        layout = lay_out(graph, note_lines=note_lines)
        for _, curve in layout.arrows:
            for x, y in points_of(curve.path):
                assert 0 <= x < layout.width
                assert 0 <= y < layout.height


def words_of(layout):
    """Return about the room of the words beside each arrow: "38.5/s · 949 kB/s"."""
    return [
        Box(x=x - 48, y=y - 10, width=96, height=12)
        for x, y in (curve.caption for _, curve in layout.arrows)
    ]


# Of forty nodes that call each other at random, some arrows have no free place.
@pytest.mark.parametrize(
    "shape", [shape for shape in SHAPES if shape is not forty], ids=lambda s: s.__name__
)
def test_no_line_runs_through_words_and_no_words_through_others(shape):
    layout = lay_out(graph_of(shape()), note_lines=3)
    words = words_of(layout)
    lines = [point for _, curve in layout.arrows for point in points_of(curve.path)]
    for box in words:
        assert box.x >= 0
        assert box.right <= layout.width
        assert box.y >= 0
        assert box.bottom <= layout.height
        assert not [
            (x, y) for x, y in lines if box.x < x < box.right and box.y < y < box.bottom
        ]
        assert not any(overlap(box, worker.box) for worker in layout.workers)
    for one, other in itertools.combinations(words, 2):
        assert not overlap(one, other)


def test_words_of_hundreds_of_arrows_are_placed_at_once():
    rng = random.Random(0)
    pairs = [rng.sample(range(60), 2) for _ in range(180)]
    names = [f"n{number}" for number in range(60)]
    vertices = [Vertex(name=n, label=n, kind="PyNode", text="f") for n in names]
    edges = [
        GraphEdge(source=names[a], target=names[b], argument="x") for a, b in pairs
    ]
    graph, began = Graph(program="p", vertices=vertices, edges=edges), thread_time()
    lay_out(graph, note_lines=3)
    # Every place against every point of every line took 5 s.
    assert thread_time() - began < 2


def drawn(pairs):
    names = dict.fromkeys(name for pair in pairs for name in pair)
    vertices = [Vertex(name=n, label=n, kind="PyNode", text="f") for n in names]
    edges = [GraphEdge(source=a, target=b, argument="x") for a, b in pairs]
    return lay_out(Graph(program="p", vertices=vertices, edges=edges))


@pytest.mark.parametrize("long", ["ad", "da"])
def test_an_arrow_passes_below_the_columns_between(long):
    layout = drawn(["ab", "bc", "cd", long, "xd", "ac"])
    between = [worker.box for worker in layout.workers if worker.vertex.name in "bc"]
    for arrow, curve in layout.arrows:
        points = list(points_of(curve.path))
        assert max(y for _, y in points) < layout.height
        if {arrow.source.name, arrow.target.name} == set(long):
            for box, (x, y) in itertools.product(between, points):
                is_level = box.x <= x <= box.right
                assert not (is_level and y < box.bottom), "it runs through a box"


def test_arrows_that_pass_the_same_columns_are_lines_of_their_own():
    layout = drawn(["ab", "bc", "ac", "db", "dc", "eb", "ec"])
    levels = [
        {y for _, y in points_of(curve.path) if y > box.bottom}
        for box in [
            worker.box for worker in layout.workers if worker.vertex.name == "b"
        ]
        for arrow, curve in layout.arrows
        if arrow.target.name == "c" and arrow.source.name != "b"
    ]
    lowest = sorted(max(some) for some in levels)
    assert len(lowest) == 3
    assert all(b - a >= 10 for a, b in itertools.pairwise(lowest))


def test_arrows_stand_for_all_edges_each_once(layout):
    drawn = [str(edge) for arrow, _ in layout.arrows for edge in arrow.edges]
    assert sorted(drawn) == sorted(map(str, layout.graph.edges))


def told(program):
    layout = lay_out(graph_of(program))
    return [
        (
            arrow.source.name or [arrow.source.label],
            arrow.target.name or [arrow.target.label],
        )
        for arrow, _ in layout.arrows
    ]


def test_handles_of_a_whole_group_are_one_arrow():
    assert told(training()) == [
        ("learner", "replay"),
        (["actors"], "replay"),
        (["actors"], "learner"),
        ("evaluator", "learner"),
    ]


def test_single_handles_are_an_arrow_each():
    single = [(f"workers/{i}", f"shards/{i}") for i in range(5)]
    assert told(rows()) == [*single, (["readers"], ["shards"])]


def test_callers_stand_left_of_those_they_call():
    layout = lay_out(graph_of(training()))
    x = {worker.vertex.name: worker.box.x for worker in layout.workers}
    assert x["actors/0"] < x["learner"] < x["replay"]
    assert x["evaluator"] < x["learner"]


def test_notes_have_room_of_their_own():
    tight, roomy = (lay_out(graph_of(training()), note_lines=n) for n in (0, 2))
    for before, after in zip(tight.workers, roomy.workers, strict=True):
        assert after.box.height == before.box.height + 30
