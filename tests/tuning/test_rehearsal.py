"""What is cut in a rehearsal, on which mesh: pure, on descriptions of variables."""

import pytest

from replicator import strategies
from replicator.errors import ArgumentError
from replicator.strategies.variables import Variable
from replicator.tuning.rehearsal import (
    Rehearsal,
    nearest_mesh,
    on_mesh,
    rehearsed_cut,
)


def variable(path, *shape, **fields):
    return Variable(path=path, shape=shape, dtype="float32", follows=path, **fields)


TRUE = [variable("params/w", 1024, 4096), variable("params/b", 4096)]
SMALL = [variable("params/w", 8, 64), variable("params/b", 64)]


def cut_of(strategy, true=TRUE, small=SMALL, devices=8):
    planned = strategy.sizes(devices)
    return rehearsed_cut(on_mesh(strategy, nearest_mesh(planned)), planned, true, small)


@pytest.mark.parametrize(
    ("strategy", "devices", "mesh"),
    [
        (strategies.fsdp(), 256, (1, 256, 1)),
        (strategies.fsdp(), 1024, (1, 256, 1)),
        (strategies.hybrid(shard=16), 2048, (16, 16, 1)),
        (strategies.data_parallel(), 384, (192, 1, 1)),
        (strategies.tensor_parallel({}, model=8, replicas=64), 512, (32, 1, 8)),
    ],
)
def test_a_larger_mesh_is_rehearsed_on_the_nearest_of_the_same_axes(
    strategy, devices, mesh
):
    assert tuple(nearest_mesh(strategy.sizes(devices)).values()) == mesh


def test_a_variable_is_cut_as_that_of_true_sizes_is():
    found = cut_of(strategies.fsdp())
    placed = [found.strategy.place(each, {"shard": 8}).stored for each in SMALL]

    # Both have less than the limit of 16 KiB; at true sizes neither has.
    assert placed == [(None, "shard"), ("shard",)]
    assert (found.cut, found.left_whole) == (2, ())


def test_a_variable_that_is_whole_at_true_sizes_is_whole():
    true = [TRUE[0], variable("params/b", 64)]
    found = cut_of(strategies.fsdp(), true)

    assert found.strategy.place(SMALL[1], {"shard": 8}).stored == (None,)
    assert found.cut == 1


def test_moments_are_cut_where_only_they_are():
    found = cut_of(strategies.zero1())
    moment = Variable(
        path="opt/mu/w",
        shape=(8, 64),
        dtype="float32",
        follows="params/w",
        is_optimizer=True,
    )

    assert found.cut == 2
    assert found.strategy.place(moment, {"shard": 8}).stored == (None, "shard")


def test_a_variable_that_does_not_divide_at_small_sizes_is_named():
    small = [variable("params/w", 6, 10), SMALL[1]]
    found = cut_of(strategies.fsdp(), small=small)

    assert (found.cut, found.left_whole) == (1, ("params/w",))


def test_a_rule_that_refuses_what_does_not_divide_does_so_here():
    strategy = strategies.tensor_parallel({"params/w": ("model",)})
    with pytest.raises(ArgumentError, match="`params/w` must divide over"):
        cut_of(strategy, small=[variable("params/w", 6, 10), SMALL[1]])


def test_brackets_in_a_path_are_no_pattern():
    odd = [variable("params/w[0]", 64, 64)]
    found = cut_of(strategies.fsdp(), [variable("params/w[0]", 4096, 64)], odd)

    assert found.cut == 1


def test_a_rehearsal_tells_what_it_left_out():
    found = Rehearsal(
        status="ok",
        reason="equal",
        planned={"shard": 1024},
        mesh={"shard": 256},
        cut=3,
        left_whole=("params/w",),
    )

    assert str(found).splitlines() == [
        "rehearsed on shard=256, the nearest to shard=1024 that fits a process: ok, "
        "equal",
        "not rehearsed: 1 parameters are cut at true sizes, and small ones do not "
        "divide (3 are cut): params/w",
    ]
    assert Rehearsal.from_json(found.to_json()) == found
