"""An array that is kept with padding reads as the array without."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.base.padded import Padded, pad_to, unpadded

ARRAY = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
KEPT = Padded(pad_to(jnp.asarray(ARRAY), (4, 2)), (3, 2))

READ = {
    "numpy": np.asarray,
    "jax": jnp.asarray,
    "a sum": lambda x: jnp.sum(x, axis=0),
    "a mean": lambda x: jnp.mean(x),
    "a product": lambda x: np.ones((2, 3), np.float32) @ x,
    "a product with jax": lambda x: jnp.ones((2, 3)) @ x,
    "a product from the left": lambda x: x @ jnp.ones((2, 2)),
    "arithmetic": lambda x: 2 - x * 3,
    "a comparison": lambda x: x > 2,
    "equality": lambda x: x == 2,
    "a sign": lambda x: -x,
    "a part": lambda x: x[-1],
    "rows": lambda x: np.stack([*x]),
    "numbers": lambda x: (len(x), x.size, x.ndim, *x.shape),
    "a part of a program": jax.jit(lambda x: jnp.mean(x) + (x * 2)[0, 1] + x.ndim),
}


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("how", READ)
def test_it_reads_as_the_array_without_padding(how, on_host):
    kept = jax.device_get(KEPT) if on_host else KEPT
    np.testing.assert_array_equal(READ[how](kept), READ[how](ARRAY))


def test_a_copy_is_one_too():
    for made in (copy.deepcopy(KEPT), pickle.loads(pickle.dumps(KEPT))):
        assert made.padded.shape == (4, 2)
        np.testing.assert_array_equal(made, ARRAY)


def test_what_it_does_not_do_is_told_with_what_does():
    with pytest.raises(AttributeError, match=r"no attribute 'T'. Take `.whole\(\)`"):
        _ = KEPT.T


def test_it_says_what_it_is():
    assert repr(KEPT).startswith("Padded(Array(")
    assert repr(KEPT).endswith("shape=(3, 2))")


def test_a_tree_without_padding_has_plain_arrays():
    found = unpadded({"w": KEPT, "n": 1})
    np.testing.assert_array_equal(found["w"], ARRAY)
    assert isinstance(found["w"], jax.Array)
    assert found["n"] == 1
