import jax
import jax.numpy as jnp
import numpy as np

from replicator.collectives import ASSUME_REPLICATED, assume_replicated
from tests.helpers import on_replicas, primitive_counts

X = np.arange(8, dtype=np.float32)


def test_the_promise_is_in_the_jaxpr_under_its_name():
    assert primitive_counts(assume_replicated, X)[ASSUME_REPLICATED] == 1


def test_the_compiler_sees_nothing_of_it():
    text = jax.jit(assume_replicated).lower(X).as_text()
    assert "stablehlo" not in text.replace("stablehlo.version", "")
    assert "call" not in text


def test_it_runs_eagerly_on_any_tree(key):
    tree = {"x": jnp.ones(3), "n": jnp.int32(2), "flag": True, "key": key}
    found = assume_replicated(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert jnp.array_equal(found["key"], key)
    assert found["n"] == 2


def test_forward_and_second_derivatives_pass_through():
    def cube(x):
        return assume_replicated(x) ** 3

    assert jax.jvp(cube, (2.0,), (1.0,)) == (8, 12)
    assert jax.grad(jax.grad(cube))(2.0) == 12
    assert jax.vmap(jax.grad(cube))(jnp.arange(3.0)).tolist() == [0, 3, 12]
    assert (
        on_replicas(jax.checkpoint(jax.grad(cube)), X).tolist() == (3 * X**2).tolist()
    )


def test_integers_may_stand_beside_what_is_differentiated():
    def loss(x, n):
        promised = assume_replicated({"x": x, "n": n})
        return promised["x"] * promised["n"].astype(jnp.float32)

    assert jax.grad(loss)(2.0, jnp.int32(3)) == 3
