"""Containers around arrays become plain JSON and come back, and nothing is executed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from replicator.compat.jaxline.structure import build, describe_structure
from replicator.errors import CheckpointMismatchError

TREES = {
    "an optimizer's state": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1, 0, 5))
    ).init({"w": np.ones(2, np.float32)}),
    "dicts": {"b": {"x/y": np.ones(1), "empty": {}}, "a": [1, (2.5, None)]},
    "numbers": [True, 1, -0.0, float("nan"), float("inf"), np.float32(3)],
    "nothing": None,
    "bfloat16": jnp.ones(2, jnp.bfloat16),
}


def there_and_back(tree, like=None):
    structure, arrays = describe_structure(tree)
    return build(json.loads(json.dumps(structure)), arrays, like, "tree")


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_as_it_was(name):
    tree = TREES[name]
    found = there_and_back(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert type(own) is type(other)
        assert np.asarray(own).tobytes() == np.asarray(other).tobytes()


def test_dicts_keep_their_order_and_keys_and_large_numbers_their_digits():
    tree = {"b": 10**30, "a": {3: "three"}}
    assert repr(there_and_back(tree)) == repr(tree)


@pytest.mark.parametrize("name", ["os:system", "os:nothing", "nowhere:Thing", "os:"])
def test_a_file_names_no_class_but_a_named_tuple_that_is_there(name):
    structure = {"is": "named tuple", "class": name, "items": []}
    with pytest.raises(CheckpointMismatchError, match="must be a `"):
        build(structure, {}, None, "opt")
