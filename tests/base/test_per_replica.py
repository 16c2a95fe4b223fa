"""A declared leaf has a replica axis outside a step, and none inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from replicator import PerReplica
from replicator.base.per_replica import (
    give_own,
    per_replica_specs,
    repeat_own,
    take_own,
)
from replicator.errors import ArgumentError
from tests.steps import replicas

TREE = {"own": PerReplica({"a": jnp.arange(3.0)}, "sum"), "all": jnp.ones(2)}


def test_only_declared_leaves_are_cut():
    everywhere, cut = per_replica_specs(TREE)  # in the order of the leaves
    assert (everywhere, cut) == (PartitionSpec(), PartitionSpec("replica"))


def test_only_declared_leaves_get_an_axis():
    repeated = repeat_own(TREE, num_replicas=4)
    assert repeated["own"].value["a"].shape == (4, 3)
    assert repeated["all"].shape == (2,)


def test_a_step_sees_its_own_without_the_axis():
    given = give_own(TREE)
    assert given["own"].value["a"].shape == (1, 3)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, take_own(given), TREE))


@pytest.mark.parametrize("word", ["sum", "mean", "first", "refuse"])
def test_its_word_for_another_number_of_replicas_survives(word):
    def init_fn(key):
        return {"own": PerReplica(jnp.zeros(()), word)}

    def step_fn(state, batch):
        assert state["own"].on_resize == word
        return {"own": PerReplica(state["own"].value + 1, word)}, {}

    rep = replicas(2)
    state, _ = rep.compile(step_fn)(rep.init(init_fn), {"x": np.ones(2)})
    assert state["own"].on_resize == word


def test_an_unknown_word_is_refused():
    with pytest.raises(ArgumentError, match="'first', 'refuse', got 'max'"):
        PerReplica(jnp.zeros(()), "max")


def test_each_replica_keeps_its_own_over_steps():
    def init_fn(key):
        return {"own": PerReplica({"last": jnp.zeros(()), "count": jnp.zeros(())})}

    def step_fn(state, batch):
        own = state["own"].value
        return {
            "own": PerReplica(
                {"last": batch["x"][0], "count": own["count"] + own["last"]}
            )
        }, {}

    rep = replicas(8)
    step, state = rep.compile(step_fn), rep.init(init_fn)
    x = np.arange(8, dtype=np.float32)
    for _ in range(3):
        state, _ = step(state, {"x": x})
    np.testing.assert_array_equal(state["own"].value["last"], x)
    np.testing.assert_array_equal(state["own"].value["count"], 2 * x)
    assert state["own"].value["last"].sharding.spec == PartitionSpec("replica")


def test_a_declared_leaf_of_another_word_is_another_structure_and_named():
    def init_fn(key):
        return {"own": PerReplica(jnp.zeros(()), "sum")}

    def step_fn(state, batch):
        return {"own": PerReplica(state["own"].value)}, {}

    rep = replicas(2)
    named = r"`own` is .*PerReplica\[\('refuse',\)\].* instead of .*'sum'"
    with pytest.raises(ValueError, match=named):
        rep.compile(step_fn)(rep.init(init_fn), {"x": np.ones(2)})


def test_a_leaf_that_loses_its_declaration_is_refused():
    def init_fn(key):
        return {"own": PerReplica(jnp.zeros(()))}

    def step_fn(state, batch):
        return {"own": state["own"].value}, {}

    rep = replicas(2)
    with pytest.raises(ValueError, match="must return a state of the structure"):
        rep.compile(step_fn)(rep.init(init_fn), {"x": np.ones(2)})
