"""A state that is there already: put on the replicas, and what a run begins with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
from replicator import PerReplica
from replicator.errors import ArgumentError
from tests.steps import (
    assert_equal_bits,
    dropout_trainer,
    regression_batch,
    replicas,
    trainer,
)

BATCHES = [regression_batch(seed=seed) for seed in range(3)]


def addresses(tree):
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


def momentum(rep):
    return rep.wrap_optimizer(optax.sgd(0.1, momentum=0.9))


def train(rep, *, make=trainer, steps=3, **first):
    init_fn, step_fn = make(momentum(rep))
    first = first or {"init_fn": init_fn}
    return rep.run(step_fn, BATCHES, steps=steps, display=False, **first)


@pytest.mark.parametrize("n", [1, 4])
def test_a_state_that_was_put_is_a_copy_under_the_shardings_of_init(n):
    rep = replicas(n)
    born = rep.init(trainer(momentum(rep))[0])
    placed = rep.put(born)
    assert_equal_bits(placed, born)
    assert not addresses(placed) & addresses(born)
    shardings = [
        [leaf.sharding for leaf in jax.tree.leaves(each)] for each in (placed, born)
    ]
    assert shardings[0] == shardings[1]


@pytest.mark.parametrize("leaf", [jnp.ones(1000), np.ones(1000, np.float32), 0.5])
def test_what_was_put_may_be_taken_over(leaf):
    rep = replicas(4)
    state = rep.put({"a": leaf, "b": leaf})
    step = rep.compile(lambda s, batch: (jax.tree.map(lambda x: 2 * x, s), {}))
    for _ in range(2):
        state, _ = step(state, regression_batch())
    np.testing.assert_array_equal(state["a"], 4 * np.asarray(leaf, np.float32))
    np.testing.assert_array_equal(leaf, np.asarray(leaf))


def test_keys_modules_and_own_leaves_are_put():
    rep = replicas(2)
    state = {"key": jax.random.key(3), "own": PerReplica(np.arange(4.0).reshape(2, 2))}
    placed = rep.put(state)
    assert placed["key"] == jax.random.key(3)
    assert placed["own"].value.addressable_shards[1].data.shape == (1, 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"tx": optax.sgd}, "`state` must hold arrays and numbers, got a `function`"),
        ({"own": PerReplica(jnp.ones(3))}, "`state` must hold a leading axis of 2 rep"),
    ],
)
def test_what_cannot_be_put_is_refused(state, message):
    with pytest.raises(ArgumentError, match=message):
        replicas(2).put(state)


@pytest.mark.parametrize("n", [1, 4])
def test_a_run_that_begins_with_a_state_makes_the_same_steps(n):
    rep = replicas(n)
    init_fn, _ = dropout_trainer(momentum(rep))
    given = rep.init(init_fn)
    expected = train(rep, make=dropout_trainer)
    found = train(rep, make=dropout_trainer, init_state=given)
    assert_equal_bits(found.state, expected.state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_the_result_of_a_run_begins_another():
    rep = replicas(2)
    first = train(rep)
    again = train(rep, init_state=first.state)
    assert again.step == 3
    assert not np.array_equal(again.state["params"]["w1"], first.state["params"]["w1"])


def test_a_run_goes_on_from_its_checkpoint_and_not_from_the_state(tmp_path):
    rep = replicas(2)
    first = rep.init(trainer(momentum(rep))[0])
    _, step_fn = trainer(momentum(rep))

    def run(steps, init_state):
        return rep.run(
            step_fn,
            BATCHES,
            init_state=init_state,
            steps=steps,
            checkpoint_dir=tmp_path,
            display=False,
        )

    run(2, first)
    other = jax.tree.map(jnp.zeros_like, first)
    assert_equal_bits(run(3, other).state, train(rep).state)


@pytest.mark.parametrize("given", ["neither", "both"])
def test_a_run_begins_with_one_of_two(given):
    first = {"init_fn": lambda key: {}, "init_state": {"a": 1.0}}
    first = first if given == "both" else {"seed": 1}
    with pytest.raises(ArgumentError, match=f"must be given.*, got {given}"):
        train(replicas(2), **first)


def test_a_state_begins_a_run_without_a_replicator():
    rep = replicas(8)
    init_fn, step_fn = trainer(momentum(rep))
    result = replicator.run(
        step_fn, BATCHES, init_state=rep.init(init_fn), steps=1, display=False
    )
    assert result.step == 1
