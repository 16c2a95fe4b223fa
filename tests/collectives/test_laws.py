"""One table of all collectives, put through one set of laws."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicator import collectives as c
from tests.helpers import on_replicas, primitive_counts, replicated_program


def everywhere(value, n):
    return np.broadcast_to(value, (n, *np.shape(value)))


def on_rows(fn, rows):
    return jnp.stack(fn(list(rows)))


def weighted(x):
    return c.all_reduce(x, weight=c.replica_id() + 1)


class Case(NamedTuple):
    """A collective of one array, and what NumPy says of arrays [n, m, d]."""

    call: Callable
    oracle: Callable
    collective: str | None


CASES = {
    "sum": Case(
        functools.partial(c.all_reduce, op="sum"),
        lambda x: everywhere(x.sum(0), len(x)),
        "psum",
    ),
    "mean": Case(c.all_reduce, lambda x: everywhere(x.mean(0), len(x)), "psum"),
    "weighted mean": Case(
        weighted,
        lambda x: everywhere(
            np.average(x, axis=0, weights=np.arange(1, len(x) + 1)), len(x)
        ),
        None,
    ),
    "ordered mean": Case(
        functools.partial(c.all_reduce, reduction="ordered"),
        lambda x: everywhere(x.mean(0), len(x)),
        "all_gather",
    ),
    "max": Case(
        functools.partial(c.all_reduce, op="max"),
        lambda x: everywhere(x.max(0), len(x)),
        "pmax",
    ),
    "min": Case(
        functools.partial(c.all_reduce, op="min"),
        lambda x: everywhere(x.min(0), len(x)),
        "pmin",
    ),
    "product": Case(
        functools.partial(c.all_reduce, op="product"),
        lambda x: everywhere(x.prod(0), len(x)),
        "all_gather",
    ),
    "all_gather": Case(c.all_gather, lambda x: everywhere(x, len(x)), "all_gather"),
    "tiled all_gather": Case(
        functools.partial(c.all_gather, tiled=True),
        lambda x: everywhere(np.concatenate(x), len(x)),
        "all_gather",
    ),
    "reduce_scatter": Case(
        c.reduce_scatter,
        lambda x: np.stack(np.split(x.mean(0), len(x))),
        "reduce_scatter",
    ),
    "broadcast": Case(
        lambda x: c.broadcast(x, source=c.num_replicas() - 1),
        lambda x: everywhere(x[-1], len(x)),
        "psum",
    ),
    "all_to_all": Case(
        c.all_to_all,
        lambda x: np.stack(
            [
                np.concatenate([np.split(sender, len(x))[me] for sender in x])
                for me in range(len(x))
            ]
        ),
        "all_to_all",
    ),
    "permute": Case(
        lambda x: c.permute(x, c.ring_pairs()),
        lambda x: np.roll(x, 1, axis=0),
        "ppermute",
    ),
    "map_gather": Case(
        lambda x: on_rows(functools.partial(c.map_gather, jnp.sin), c.broadcast(x)),
        lambda x: everywhere(np.sin(x[0]), len(x)),
        None,
    ),
    "map_reduce": Case(
        lambda x: c.map_reduce(jnp.sin, list(c.broadcast(x))),
        lambda x: everywhere(np.sin(x[0]).sum(0), len(x)),
        None,
    ),
    "add_in_order": Case(
        lambda x: c.add_in_order(jax.tree.map(jnp.ones_like, x), x),
        lambda x: everywhere(1 + x.sum(0), len(x)),
        "all_gather",
    ),
    "assume_replicated": Case(c.assume_replicated, lambda x: x, "assume_replicated"),
}
FLOATS_ONLY = {
    "mean",
    "weighted mean",
    "ordered mean",
    "reduce_scatter",
    "map_gather",
    "map_reduce",
}

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def rows(n, shape=(8, 3), dtype=np.float32):
    return np.random.default_rng(n).normal(size=(n, *shape)).astype(dtype)


@every_case
@pytest.mark.parametrize("n", [1, 2, 8])
def test_equals_numpy(case, n):
    x = rows(n)
    found = on_replicas(case.call, x, n=n)
    np.testing.assert_allclose(found, case.oracle(x), rtol=1e-5, atol=1e-6)


@every_case
def test_outside_any_replica_context_acts_as_one_replica(case):
    x = rows(1)
    np.testing.assert_allclose(case.call(x[0]), case.oracle(x)[0], rtol=1e-6)


@every_case
def test_holds_inside_jit_cond_scan_and_vmap(case):
    def transformed(x):
        zeros = jax.tree.map(jnp.zeros_like, case.call(x))
        return (
            jax.jit(case.call)(x),
            # All replicas take the same branch, and only one branch communicates.
            lax.cond(c.num_replicas() > 1, case.call, lambda _: zeros, x),
            lax.scan(lambda s, row: (s, case.call(row)), 0, x[None])[1][0],
            jax.vmap(case.call)(jnp.stack([0 * x, x]))[1],
        )

    x = rows(2, shape=(4, 2))
    for found in on_replicas(transformed, x, n=2):
        np.testing.assert_allclose(found, case.oracle(x), rtol=1e-5, atol=1e-6)


@every_case
def test_gradient_equals_central_differences(case):
    x, h = rows(2, shape=(4, 2), dtype=np.float64), 1e-5

    def loss(x):
        # Different on each replica, so that a gradient sent to the wrong one shows.
        return jnp.sum(jnp.sin(case.call(x)) * (1.0 + c.replica_id().astype(float)))

    with jax.enable_x64(True):
        program = jax.jit(replicated_program(jax.value_and_grad(loss), 2))
        _, found = program(x)
        steps = h * np.eye(x.size).reshape(x.size, *x.shape)
        rises = [
            program(x + step)[0].sum() - program(x - step)[0].sum() for step in steps
        ]
        expected = np.array(rises) / (2 * h)
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", sorted(CASES.keys() - FLOATS_ONLY))
def test_trees_keep_structure_and_dtypes(name):
    tree = {
        "w": jnp.ones((2, 4, 3)),
        "b": (jnp.ones((2, 4), jnp.bfloat16), None),
        "n": jnp.ones((2, 4, 1, 2), jnp.int8),
    }
    call = functools.partial(jax.tree.map, CASES[name].call)
    leaf_by_leaf = jax.eval_shape(replicated_program(call, 2), tree)
    assert jax.eval_shape(replicated_program(CASES[name].call, 2), tree) == leaf_by_leaf
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(leaf_by_leaf)]
    assert dtypes == [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.collective])
def test_one_collective_per_leaf(name):
    counts = primitive_counts(CASES[name].call, [rows(8), rows(8)])
    known = {case.collective for case in CASES.values()}
    found = {name: counts[name] for name in known if counts[name]}
    assert found == {CASES[name].collective: 2}


def test_a_jitted_function_is_traced_again_for_another_number_of_replicas():
    total = jax.jit(functools.partial(c.all_reduce, op="sum"))
    assert [total(1.0)] + [
        on_replicas(total, np.ones(n, np.float32), n=n)[0] for n in (2, 8)
    ] == [1, 2, 8]
