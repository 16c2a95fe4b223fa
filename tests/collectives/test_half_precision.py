"""Sums over replicas of narrow floats: in float32, and back in the leaf's own dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator import collectives as c
from replicator.engine.analysis.dataflow import sub_jaxprs
from tests.helpers import on_replicas, replicated_program

UNEQUAL = [[0], [1, 2], [3, 4, 5, 6, 7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
MEANS = {
    "fast": {},
    "ordered": {"reduction": "ordered"},
    "weighted": {"weight": 100_000.0},
    "ordered weighted": {"reduction": "ordered", "weight": 100_000.0},
    "groups": {"groups": UNEQUAL},
    "ordered groups": {"groups": PAIRS, "reduction": "ordered"},
    "weighted groups": {"groups": UNEQUAL, "weight": 7},
}
REDUCTIONS = {
    "sum": functools.partial(c.all_reduce, op="sum"),
    "mean": c.all_reduce,
    "weighted": lambda x: c.all_reduce(x, weight=c.replica_id() + 1),
    "ordered": functools.partial(c.all_reduce, reduction="ordered"),
    "ordered sum": functools.partial(c.all_reduce, op="sum", reduction="ordered"),
    "reduce_scatter": functools.partial(c.reduce_scatter, op="sum"),
    "scattered mean": c.reduce_scatter,
}
MOVES = {
    "all_gather": c.all_gather,
    "tiled": functools.partial(c.all_gather, tiled=True),
    "broadcast": c.broadcast,
}
half = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])


def halves(*values, dtype=jnp.float16):
    return jnp.asarray(values, dtype)


def wire_dtypes(fn, *arrays, n=8):
    """List the dtypes that the collectives of a program take, however deep."""
    found = set()

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("psum", "reduce_scatter", "all_gather", "pmax"):
                found.update(str(each.aval.dtype) for each in eqn.invars)
            for inner in sub_jaxprs(eqn):
                look(inner)

    look(jax.make_jaxpr(replicated_program(fn, n))(*arrays).jaxpr)
    return found


@pytest.mark.parametrize("options", MEANS.values(), ids=MEANS)
@half
def test_a_mean_of_large_numbers_is_finite(options, dtype):
    x = jnp.full(8, 40_000, dtype)
    found = on_replicas(lambda x: c.all_reduce(x, **options), x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_mean_is_as_finite_on_eight_replicas_as_on_two(n):
    x = jnp.full(n, 60_000, jnp.float16)
    assert on_replicas(c.all_reduce, x, n=n).tolist() == x.tolist()


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
def test_a_sum_overflows_where_it_is_too_large_and_not_before(reduction):
    total = functools.partial(c.all_reduce, op="sum", reduction=reduction)
    fits, large = halves(61440, 61440, -61440, -51200), halves(6e4, 6e4, 0, 0)
    np.testing.assert_array_equal(on_replicas(total, fits, n=4), [10240] * 4)
    assert np.isinf(on_replicas(total, large, n=4)).all()


def test_a_product_overflows_where_it_is_too_large_and_not_before():
    x = halves(300, 300, 0.01, 0.01)
    found = on_replicas(functools.partial(c.all_reduce, op="product"), x, n=4)
    np.testing.assert_allclose(found, np.full(4, 9), rtol=3e-3)


@pytest.mark.parametrize("call", REDUCTIONS.values(), ids=REDUCTIONS)
@half
def test_a_result_has_the_dtype_of_its_leaf(call, dtype):
    assert on_replicas(call, jnp.ones((8, 8, 2), dtype)).dtype == dtype


@pytest.mark.parametrize("name", ["sum", "mean", "reduce_scatter", "scattered mean"])
def test_float16_travels_as_float32_and_bfloat16_as_it_is(name):
    for dtype, wire in {"float16": "float32", "bfloat16": "bfloat16"}.items():
        x = jnp.ones((8, 8), dtype)
        assert wire_dtypes(REDUCTIONS[name], x) == {wire}


def test_what_only_moves_travels_as_it_is():
    moved = {
        **MOVES,
        "max": functools.partial(c.all_reduce, op="max"),
        "map_reduce": lambda x: c.map_reduce(jnp.sin, [x[0]] * 3, op="max"),
    }
    for call in moved.values():
        assert wire_dtypes(call, jnp.ones((8, 8), jnp.float16)) == {"float16"}


@pytest.mark.parametrize("name", [*REDUCTIONS, *MOVES])
def test_cotangents_add_up_in_float32(name):
    call = {**REDUCTIONS, **MOVES}[name]
    # Large ones, and those that take them back: a float16 sum is lost on the way.
    factors = halves(6e4, 6e4, -6e4, -5e4)

    def loss(x, factor):
        return (call(x) * factor).astype(jnp.float32).sum()

    def wide_loss(x, factor):
        return (call(x) * factor).sum()

    x = jnp.full((4, 4), 0.5, jnp.float16)
    found = on_replicas(jax.grad(loss), x, factors, n=4)
    expected = on_replicas(
        jax.grad(wide_loss), x.astype(jnp.float32), factors.astype(jnp.float32), n=4
    )
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, expected.astype(jnp.float16), rtol=2e-3)


@half
def test_forward_mode_goes_through(dtype):
    for call in {**REDUCTIONS, **MOVES}.values():
        x = jnp.ones((4, 4), dtype)
        tangent = on_replicas(lambda x, f=call: jax.jvp(f, (x,), (x,))[1], x, n=4)
        assert tangent.dtype == dtype


def test_tied_maxima_share_a_large_gradient():
    def loss(x):
        return c.all_reduce(x, "max") * halves(3e4)[0]

    found = on_replicas(jax.grad(loss), jnp.ones(8, jnp.float16))
    np.testing.assert_array_equal(found, np.full(8, 3e4, np.float16))


@pytest.mark.parametrize("n", [1, 2, 8])
def test_map_reduce_adds_up_in_float32(n):
    def mean(x):
        return c.map_reduce(lambda item: item * jnp.ones_like(x), items, op="mean")

    items = [halves(4e4)[0]] * 16
    found = on_replicas(mean, jnp.ones(n, jnp.float16), n=n)
    assert found.dtype == jnp.float16
    np.testing.assert_array_equal(found, np.full(n, 4e4, np.float16))


@half
def test_outside_any_replica_context_nothing_changes(dtype):
    x = jnp.full((4, 2), 40_000, dtype)
    for call in {**REDUCTIONS, **MOVES}.values():
        found = call(x)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.reshape(x.shape), x)
    reduced = c.map_reduce(lambda item: item, list(x), op="mean")
    assert reduced.dtype == dtype
    np.testing.assert_array_equal(reduced, x[0])
