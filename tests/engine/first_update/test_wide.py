"""A program in wider floats: what is left of the difference is rounding."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from replicator.engine.first_update.wide import narrowest, widened

HALF = jnp.bfloat16
X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


def scanned(x, w):
    turn = jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None))
    return lax.scan(turn, x, None, length=2)[0]


PROGRAMS = {
    "product": lambda x, w: x @ w,
    "loop": scanned,
    "condition": lambda x, w: lax.cond(x.sum() > 9, lambda: x, lambda: x @ w),
    "while": lambda x, w: lax.fori_loop(0, w.ndim, lambda _, x: jnp.tanh(x @ w), x),
    "write": lambda x, w: x.at[jnp.array([0, 1, 0])].add((x @ w)[:3]),
    "custom rule": lambda x, w: jax.nn.silu(jax.nn.relu(x @ w)),
    "sorted": lambda x, w: jnp.sort(x @ w, 0),
    "noise": lambda x, w: x @ w + jax.random.uniform(jax.random.key(0), (8, 4), HALF),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_half_precision_becomes_one_in_float32(name):
    def run(x, dtype):
        found = PROGRAMS[name](x.astype(dtype), (x[:4] / 2).astype(dtype))
        return jax.nn.tanh(found).astype(jnp.float32).sum()

    traced = jax.make_jaxpr(lambda x: run(x, HALF))(X)
    [found] = jax.jit(widened(traced))(X)
    if name == "noise":  # the numbers of bfloat16 are other numbers
        assert abs(found - run(X, HALF)) < 0.1
    else:
        assert jnp.allclose(found, run(X, jnp.float32), rtol=1e-6)


def test_a_program_tells_how_coarsely_it_rounds():
    traced = jax.make_jaxpr(lambda x: scanned(x.astype(HALF), x[:4].astype(HALF)))(X)
    assert narrowest(traced.jaxpr, on_cpu=True) == jnp.finfo(HALF).eps
    traced = jax.make_jaxpr(lambda x: scanned(x, x[:4]))(X)
    assert narrowest(traced.jaxpr, on_cpu=True) == 0.0
    assert narrowest(traced.jaxpr, on_cpu=False) > 0
