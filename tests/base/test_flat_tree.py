"""A state goes from step to step as its leaves; it is put together for who asks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicator
from replicator.base.flat_tree import FlatTree, whole
from replicator.hooks import Hook

TREE = {"a": [1, 2], "b": (3,)}
BATCH = {"x": np.ones((8, 1), np.float32)}


@jax.tree_util.register_pytree_node_class
class Counted:
    """A node that counts how often it is put together outside of a trace."""

    built = 0

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        if isinstance(children[0], jax.Array) and not isinstance(
            children[0], jax.core.Tracer
        ):
            cls.built += 1
        return cls(*children)


class Looks(Hook):
    """Looks at the state of every fourth step."""

    def __init__(self):
        self.seen = []

    def on_state(self, event):
        if event.step % 4 == 0:
            self.seen.append(float(event.state.value))


@pytest.fixture
def rep():
    return replicator.Replicator()


def init_fn(key):
    return Counted(jnp.zeros(()))


def step_fn(state, batch):
    total = replicator.all_reduce(batch["x"].sum(), "sum")
    return Counted(state.value + total), {"total": total}


def built_in_a_run(rep, *, steps, hooks=()):
    before = Counted.built
    result = rep.run(
        step_fn, [BATCH], init_fn=init_fn, steps=steps, hooks=hooks, display=False
    )
    assert result.state.value == 8 * steps
    return Counted.built - before


def test_it_is_the_tree_it_was_made_of():
    assert FlatTree.of(TREE).tree == TREE


def test_a_flat_tree_is_not_made_flat_twice():
    flat = FlatTree.of(TREE)
    assert FlatTree.of(flat) is flat


def test_jax_maps_over_its_leaves():
    assert jax.tree.map(lambda x: -x, FlatTree.of(TREE)).tree == {
        "a": [-1, -2],
        "b": (-3,),
    }


def test_what_is_no_flat_tree_is_whole():
    assert whole(TREE) is TREE
    assert whole(FlatTree.of(TREE)) == TREE


def test_a_tree_of_nothing_is_nothing():
    assert FlatTree.of(None).tree is None


def test_a_run_builds_the_state_no_more_often_for_more_steps(rep):
    assert built_in_a_run(rep, steps=12) == built_in_a_run(rep, steps=3)


def test_a_hook_that_looks_has_the_state_built_for_it(rep):
    looks = Looks()
    more = built_in_a_run(rep, steps=12, hooks=[looks]) - built_in_a_run(rep, steps=12)
    assert looks.seen == [32, 64, 96]
    assert more == 2  # that of the last step is the result's, too


def test_a_compiled_step_returns_a_tree_for_a_tree(rep):
    state, _ = rep.compile(step_fn)(rep.init(init_fn), BATCH)
    assert isinstance(state, Counted)


def test_a_compiled_step_returns_a_flat_tree_for_a_flat_tree(rep):
    state, _ = rep.compile(step_fn)(FlatTree.of(rep.init(init_fn)), BATCH)
    assert isinstance(state, FlatTree)
    assert state.tree.value == 8
