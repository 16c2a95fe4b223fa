"""Layouts and moves between slices: boxes are those of JAX, moves as few as can be."""

import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

from replicator.controller.layouts import SliceLayout, misfit, plan_move

AXES = {"x": 2, "y": 2}
SPECS = [P(), P("x"), P("y", "x"), P(None, "y"), P(("y", "x")), P(None, ("x", "y"))]


def layout(spec=(), **axes):
    return SliceLayout(axes=tuple(axes.items()), spec=P(*spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_boxes_are_those_of_jax(spec):
    found = layout(spec, **AXES)
    sharding = found.sharding(jax.devices()[:4])
    indices = sharding.devices_indices_map((8, 4))
    boxes = [
        tuple(part.indices(size)[:2] for part, size in zip(index, (8, 4), strict=True))
        for index in (indices[device] for device in jax.devices()[:4])
    ]
    assert found.boxes((8, 4)) == boxes


def test_the_same_layout_moves_shard_to_shard():
    move = plan_move((8, 4), layout(["x"], x=4), layout(["a"], a=4))
    assert (move.before, move.sources, move.after, move.size) == (
        None,
        (0, 1, 2, 3),
        None,
        32,
    )


def test_fewer_devices_are_resharded_for_on_the_source():
    move = plan_move((8, 4), layout(["x"], x=4), layout([None, "x"], x=2))
    assert move.before is not None
    assert (move.after, move.size) == (None, 32)


def test_a_whole_copy_is_gathered_on_the_target():
    move = plan_move((8, 4), layout(["x"], x=2), layout(x=2))
    assert move.size == 32
    assert move.after == layout(x=2)


def test_devices_that_hold_the_same_take_turns():
    assert plan_move((8,), layout(x=2), layout(x=4)).sources == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("source", "target"),
    [*itertools.product([layout(["x"], x=n) for n in (1, 2, 3)], repeat=2)],
)
def test_every_pair_of_sizes_has_a_plan(source, target):
    move = plan_move((6, 6), source, target)
    held = (move.before or source).boxes((6, 6))
    taken = [held[number] for number in move.sources]
    assert taken == move.arrived.boxes((6, 6))
    assert (move.after or move.arrived).boxes((6, 6)) == target.boxes((6, 6))


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        (P("x"), (3,), "does not divide by 2"),
        (P("z"), (4,), "no axis 'z'"),
        (P("x", "y"), (4,), "2 entries for 1 dimensions"),
        (P(("x", "y")), (4,), ""),
    ],
    ids=str,
)
def test_a_spec_that_does_not_fit_is_known(spec, shape, why):
    assert why in misfit(spec, AXES, shape)
