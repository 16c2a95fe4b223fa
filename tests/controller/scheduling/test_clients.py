"""Clients, memory of slices, copies and the timeline, over islands of this process."""

import gc
import json
import threading
import weakref
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from replicator import controller
from replicator.errors import ArgumentError

ONES = np.ones(2, np.float32)


@pytest.fixture(scope="module")
def pw():
    with controller.local(islands=2, devices=2) as opened:
        yield opened


def values(tree):
    return jax.tree.map(lambda future: np.asarray(future).tolist(), tree)


def live(pw):
    """Return how many results live on islands, once all that was called is done."""
    gc.collect()
    fences = [pw.put(ONES, pw.slice(1, island=island)) for island in pw._islands]
    values(fences)
    islands = pw._islands.values()
    ours = {fence._key[0] for fence in fences}  # their orders may not be done
    return sum(run not in ours for each in islands for run, _ in [*each._values])


class Gate:
    """Ops that end when it is opened."""

    def __init__(self, of, on):
        self.event = threading.Event()

        def wait(x):
            self.event.wait(60)
            return np.asarray(x)

        shape = jax.ShapeDtypeStruct(ONES.shape, ONES.dtype)
        self.fn = of.fn(lambda x: jax.pure_callback(wait, shape, x), on)


def test_a_client_has_functions_dataflows_and_arrays(pw):
    with pw.client("alice", weight=4) as alice:
        on = alice.slice(2)
        double = alice.fn(lambda x: x * 2, on)

        @alice.program
        def f(x):
            return double(double(x)) + 1

        placed = alice.put(ONES, on, P("devices"))
        assert values((f(placed), alice.copy(placed, on))) == ([5.0, 5.0], [1.0, 1.0])


def test_a_future_of_a_client_that_left_is_refused_by_its_name(pw):
    on = pw.slice(1)
    with pw.client("bob") as bob:
        future = bob.put(ONES, on)
        function = bob.fn(lambda x: x, on)
    with pytest.raises(ArgumentError, match="a client that is there, got one of `bob`"):
        future.result()
    with pytest.raises(ArgumentError, match="got one of `bob`, which left"):
        pw.put(future, on)
    with pytest.raises(ArgumentError, match="a client must be there to call"):
        function(ONES)
    with pw.client("bob") as again:
        assert values(again.put(ONES, on)) == [1.0, 1.0]


def test_what_a_client_held_is_freed_when_it_leaves(pw):
    on = pw.slice(2)
    before = live(pw)
    with pw.client("carol") as carol:
        kept = [carol.put(ONES, on) for _ in range(5)]
        values(kept)
        assert live(pw) == before + 5
    assert live(pw) == before
    del kept
    gone = pw.client("dave")
    kept = [gone.put(ONES, on) for _ in range(5)]
    record = weakref.ref(gone._record)
    del gone, kept
    on.puts.clear()
    assert live(pw) == before
    assert record() is None


def test_runs_of_a_client_that_leaves_are_cancelled_and_others_go_on(pw, monkeypatch):
    island, dropped = pw._islands["island1"], []
    drop = island.drop
    monkeypatch.setattr(island, "drop", lambda key: (dropped.append(key), drop(key)))
    gate = Gate(pw, pw.slice(1, island="island1"))
    with pw.client("erin") as erin:
        double = erin.fn(lambda x: x * 2, gate.fn.slice)
        held = [gate.fn(ONES) for _ in range(20)]  # more than are in flight
        pw._submissions.settle()  # as many are sent as may be
        waits = double(ONES)
        behind = pw.fn(lambda x: x + 1, gate.fn.slice)(waits)
    try:
        with pytest.raises(ArgumentError, match="must be able to start, got a client"):
            behind.result(60)
        pw._submissions.settle()
        # A process that was asked for them waits for them no longer.
        assert {waits._key, behind._key} <= {*dropped}
    finally:
        gate.event.set()
    assert values(held[-1]) == [1.0, 1.0]


def test_a_client_that_computes_nothing_delays_nobody(pw):
    with pw.client("frank", weight=1000):
        assert values(pw.put(ONES, pw.slice(1))) == [1.0, 1.0]


def test_a_dataflow_waits_for_memory_until_futures_are_dropped():
    with controller.local(islands=1, devices=1) as pw:
        on = pw.slice(1, memory_bytes=100)
        first = pw.put(np.ones(15, np.float32), on)
        first.result()
        second = pw.put(np.ones(15, np.float32), on)
        # Behind it: one that fits, which ends while it waits.
        assert values(pw.put(ONES, on)) == [1.0, 1.0]
        assert not second.done()
        del first
        gc.collect()
        assert second.result(60).shape == (15,)


def test_memory_is_counted_by_the_part_that_a_device_holds():
    with controller.local(islands=1, devices=2) as pw:
        on = pw.slice(2, memory_bytes=100)
        cut = pw.put(np.ones(40, np.float32), on, P("devices"))
        assert cut.result().shape == (40,)


def test_a_slice_is_given_back_when_it_is_closed_or_garbage():
    with controller.local(islands=1, devices=1) as pw:
        memory = pw._islands["island0"].devices[0].memory_bytes
        on = pw.slice(1, memory_bytes=memory)
        function, future = pw.fn(lambda x: x * 2, on), pw.put(ONES, on)
        values(function(future))
        with pytest.raises(ArgumentError, match="memory that is free"):
            pw.slice(1, memory_bytes=memory)
        on.close()
        again = pw.slice(1, memory_bytes=memory)
        for use in (lambda: function(ONES), future.result, lambda: pw.fn(abs, on)):
            with pytest.raises(ArgumentError, match="must be of a slice that is open"):
                use()
        values(pw.fn(lambda x: x * 2, again)(pw.put(ONES, again)))
        del again
        assert pw.slice(1, memory_bytes=memory).memory_bytes == memory


def test_a_copy_is_of_one_step_in_all_leaves_and_never_goes_back(pw):
    source, target = pw.slice(2, island="island0"), pw.slice(1, island="island1")
    shapes = {"a": (4, 2), "b": (3,), "c": ()}
    step = pw.fn(
        lambda state: jax.tree.map(lambda x: x + 1, state), source, donate=(0,)
    )
    state = pw.put({k: np.zeros(s, np.float32) for k, s in shapes.items()}, source)
    copies = []
    for _ in range(20):
        copies.append((pw.copy(state, target), pw.copy(state, source)))
        state = step(step(state))
    for number, both in enumerate(copies):
        for copied in both:
            leaves = jax.tree.leaves(copied)
            assert all((np.asarray(leaf) == 2 * number).all() for leaf in leaves)


def test_a_copy_keeps_its_layout_where_the_axes_are_equal(pw):
    two = [pw.slice(2, island=f"island{n}") for n in range(2)]
    cut = pw.put(ONES, two[0], P("devices"))
    assert pw.copy(cut, two[1]).result().sharding.spec == P("devices")
    whole = pw.copy(cut, two[1], P())
    assert whole.result().sharding.spec == P()
    key = pw.put(jax.random.key(1), two[0])
    copied = pw.copy(key, two[0]).result()
    assert (jax.random.key_data(copied) == jax.random.key_data(key.result())).all()


def test_the_timeline_says_what_ran_where_and_for_whom():
    with controller.local(islands=2, devices=1) as pw, pw.client("grace") as grace:
        ops = [pw.slice(1, island=f"island{n}") for n in range(2)]
        first = grace.fn(lambda x: x * 2, ops[0])
        second = grace.fn(lambda x: x + 1, ops[1])
        grace.program(lambda x: second(first(x)))(ONES).result()
        timeline = pw.timeline()
    spans = [each for each in timeline.spans if each.op != "put"]
    assert [(s.op, s.island, s.places, s.client) for s in spans] == [
        ("lambda", "island0", (0,), "grace"),
        ("lambda", "island1", (0,), "grace"),
    ]
    assert spans[0].begin_s <= spans[0].end_s <= spans[1].begin_s <= spans[1].end_s
    events = json.loads(timeline.to_perfetto())["traceEvents"]
    assert [each["name"] for each in events if each["ph"] == "X"][-1] == "lambda"
    picture = ElementTree.fromstring(timeline.to_svg())
    bars = picture.findall(".//*[@class='span']")
    assert len(bars) == len(timeline.spans)
