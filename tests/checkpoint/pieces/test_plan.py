"""Each region is written by one of those that hold it, and the work is even."""

import math

import pytest

from replicator.checkpoint.pieces.plan import Spread, make_plan

PROCESSES = [0, 1, 2, 3]


def whole(shape, holders=(0, 1, 2, 3), itemsize=4):
    """A leaf that is whole in several processes."""
    start = (0,) * len(shape)
    return Spread(
        shape=shape,
        dtype="float32",
        itemsize=itemsize,
        piece=shape,
        holders={start: tuple(holders)},
    )


def cut(shape):
    """A leaf whose first axis is cut over all processes."""
    piece = (shape[0] // 4, *shape[1:])
    holders = {(n * piece[0], *(0 for _ in shape[1:])): (n,) for n in PROCESSES}
    return Spread(
        shape=shape, dtype="float32", itemsize=4, piece=piece, holders=holders
    )


def written(plan, leaves):
    """Bytes that each process writes."""
    return [
        sum(
            math.prod(region.box.shape) * leaves[region.leaf].itemsize
            for region in (*plan.regions[process], *plan.small[process])
        )
        for process in PROCESSES
    ]


LEAVES = {
    "one leaf in all": [whole((4096, 4096))],
    "many leaves in all": [whole((256, 256 + n)) for n in range(40)],
    "cut over all": [cut((1024, 1024))] * 3,
    "some in two only": [whole((1024, 1024), holders=(0, 1)), whole((2048, 1024))] * 2,
    "small in all": [whole((64,)) for _ in range(5000)],
}


@pytest.mark.parametrize("name", LEAVES)
def test_each_value_is_written_once_by_a_process_that_holds_it(name):
    leaves = LEAVES[name]
    plan = make_plan(leaves, PROCESSES)
    sizes = [0] * len(leaves)
    for process in PROCESSES:
        for region in (*plan.regions[process], *plan.small[process]):
            leaf = leaves[region.leaf]
            piece = tuple(
                at // n * n for at, n in zip(region.box.start, leaf.piece, strict=True)
            )
            assert process in leaf.holders[piece]
            sizes[region.leaf] += math.prod(region.box.shape)
    assert sizes == [math.prod(leaf.shape) for leaf in leaves]


@pytest.mark.parametrize("name", sorted(set(LEAVES) - {"small in all"}))
def test_the_work_is_even(name):
    loads = written(make_plan(LEAVES[name], PROCESSES), LEAVES[name])
    assert max(loads) <= 1.1 * sum(loads) / len(loads)


def test_small_leaves_share_few_arrays_and_lie_one_behind_another():
    plan = make_plan(LEAVES["small in all"], PROCESSES)
    assert len(plan.arrays) == 2  # 1.3 MB in bundles of 1 MiB
    (first, *_), (last,) = plan.leaves[0].small, plan.leaves[-1].small
    places = sorted(
        (piece.array, piece.offset) for leaf in plan.leaves for piece in leaf.small
    )
    assert len(set(places)) == 5000
    assert {first.array, last.array} <= {array.name for array in plan.arrays}


def test_a_leaf_without_elements_has_no_place():
    plan = make_plan([whole((0, 3)), whole((2,))], PROCESSES)
    assert (plan.leaves[0].array, plan.leaves[0].small) == (None, ())
