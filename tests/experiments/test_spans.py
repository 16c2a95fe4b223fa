"""When slices computed."""

import itertools

import numpy as np

from experiments.drawing import draw_spans
from experiments.spans import Spans, busy
from replicator import controller


def test_an_op_begins_when_the_one_before_it_on_its_slice_has_ended():
    with controller.local(islands=2, devices=1) as pw:
        here, there = pw.slice(1, island="island0"), pw.slice(1, island="island1")
        double = pw.fn(lambda x: x * 2, here)
        add = pw.fn(lambda x: x + 1, there)
        spans = Spans(pw, here=here, there=there)
        x = np.ones(2, np.float32)
        for _ in range(3):
            x = double(x)
        x.result()  # it is noted before the next op is called
        add(x).result()
    here, (taken,) = spans.found["here"], spans.found["there"]
    assert all(began <= ended for began, ended in [*here, taken])
    for (_, ended), (began, _) in itertools.pairwise(here):
        assert ended <= began
    assert taken[0] >= here[-1][1]


def test_the_busy_share_counts_what_was_behind_a_second():
    found = {"a": [(0.0, 1.0), (2.0, 4.0)], "b": [(3.0, 5.0)]}
    assert busy(found, "a", 0.0) == 3 / 5
    assert busy(found, "a", 3.0) == 1 / 2
    assert busy(found, "b", 0.0) == 2 / 5


def test_spans_are_drawn_below_curves(tmp_path):
    spans = {"a": [(0.0, 1.0), (2.0, 4.0)], "b": [(3.0, 5.0)]}
    curves = {"one": [(0.0, 1.0), (4.0, 2.0)], "two": [(0.0, 2.0), (4.0, 4.0)]}
    path = tmp_path / "new" / "spans.png"
    draw_spans(
        spans, path, title="t", seconds=2.0, curves=curves, ylabel="y", marks=[3.0]
    )
    assert path.read_bytes()[:4] == b"\x89PNG"
