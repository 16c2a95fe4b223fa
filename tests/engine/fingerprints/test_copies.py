"""Copies of a leaf follow from its sharding; the copy that differs is named."""

import jax
import numpy as np
import pytest

from replicator import PerReplica, strategies
from replicator.engine.fingerprints.copies import (
    copied,
    describe_place,
    named_arrays,
    odd_copies,
)
from tests.steps import adam, replicas, trainer

MU = "opt/inner/0/mu/w1"
WHOLE, TWICE = (0,) * 8, (0, 1, 2, 3) * 2
EXPECTED = {
    "data_parallel": (None, {"params/w1": WHOLE, MU: WHOLE}),
    "zero1": (strategies.zero1(whole_below_bytes=0), {"params/w1": WHOLE, MU: None}),
    "fsdp": (strategies.fsdp(whole_below_bytes=0), {"params/w1": None, MU: None}),
    "hybrid": (
        strategies.hybrid(shard=4, whole_below_bytes=0),
        {"params/w1": TWICE, MU: TWICE},
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_strategy_decides_which_devices_hold_the_same(name):
    strategy, expected = EXPECTED[name]
    rep = replicas(8, strategy=strategy)
    shapes = jax.eval_shape(trainer(rep.wrap_optimizer(adam()))[0], jax.random.key(0))
    found, alone = copied(
        named_arrays(shapes), rep.mesh, shardings=rep.layout.state_shardings(shapes)
    )
    pieces = {leaf.path: leaf.pieces for leaf in found}
    assert {path: pieces.get(path) for path in expected} == expected
    assert {path for path, each in expected.items() if each is None} <= set(alone)


def test_what_a_replica_has_for_itself_has_no_copy():
    rep = replicas(8)
    state = {"own": PerReplica(np.zeros((8, 3))), "w": np.zeros(3)}
    found, alone = copied(
        named_arrays(state), rep.mesh, shardings=rep.layout.state_shardings(state)
    )
    assert [leaf.path for leaf in found] == ["w"]
    assert alone == ["own/value"]


def test_arrays_of_one_device_or_of_the_host_have_no_copy():
    arrays = [("a", np.zeros(3)), ("b", jax.numpy.zeros(3))]
    found, alone = copied(arrays, replicas(8).mesh)
    assert (found, alone) == ([], ["a", "b"])


@pytest.mark.parametrize(
    ("values", "pieces", "odd"),
    [
        ("aaaa", (0, 0, 0, 0), []),
        ("aaba", (0, 0, 0, 0), [2]),
        ("ab", (0, 0), [0, 1]),
        ("abab", (0, 1, 0, 1), []),
        ("abcb", (0, 1, 0, 1), [0, 2]),
        ("abcd", (0, 0, 0, 0), [0, 1, 2, 3]),
        ("aabb", (0, 0, 0, 0), [0, 1, 2, 3]),
        ("aabc", (0, 0, 0, 0), [0, 1, 2, 3]),
        ("aaabc", (0, 0, 0, 0, 0), [3, 4]),
        ("ab", (0, 1), []),
    ],
)
def test_the_majority_is_right(values, pieces, odd):
    assert odd_copies(values, pieces) == odd


def test_a_place_leaves_axes_of_size_one_out():
    rep = replicas(8, strategy=strategies.hybrid(shard=4))
    places = [describe_place(rep.mesh, number) for number in (0, 3, 5)]
    assert places == ["replica 0, shard 0", "replica 0, shard 3", "replica 1, shard 1"]
    assert describe_place(replicas(8).mesh, 5) == "replica 5"
