"""Marks flow through every kind of equation, and only where values do."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from replicator.dataflow import DependsOn, find_equation, flow, over_axis, sub_jaxprs
from replicator.mesh import replica_mesh


def depends(fn, *arguments):
    """Tell, for each output of `fn`, the numbers of the arguments behind it."""
    jaxpr = jax.make_jaxpr(fn)(*arguments).jaxpr
    marks = [frozenset({position}) for position in range(len(jaxpr.invars))]
    return [set(mark) for mark in flow(jaxpr, marks, DependsOn())]


@jax.custom_vjp
def custom(a, b):
    return a + b, b


custom.defvjp(lambda a, b: (custom(a, b), None), lambda _, g: (g[0], g[1]))

CASES = {
    "arithmetic": (lambda a, b, c: (a + b, c), [{0, 1}, {2}]),
    "a constant": (lambda a, b, c: (1.0 * jnp.ones(()), a), [set(), {0}]),
    "jit": (jax.jit(lambda a, b, c: (a + b, c)), [{0, 1}, {2}]),
    "nested jit": (lambda a, b, c: jax.jit(jax.jit(lambda x: (x, b)))(a), [{0}, {1}]),
    "remat": (jax.checkpoint(lambda a, b, c: (jnp.sin(a), b)), [{0}, {1}]),
    "custom_vjp": (lambda a, b, c: custom(a, b), [{0, 1}, {1}]),
    "vmap": (
        lambda a, b, c: jax.vmap(lambda x: (x + b, c))(a[None]),
        [{0, 1}, {2}],
    ),
    "cond": (
        lambda a, b, c: lax.cond(a > 0, lambda: (b, c), lambda: (c, 2 * c)),
        [{0, 1, 2}, {0, 2}],
    ),
    "scan": (
        lambda a, b, c: lax.scan(
            lambda carry, _: ((carry[1], carry[1] + c), None), (a, b), None, length=3
        )[0],
        [{1, 2}, {1, 2}],
    ),
    "scan of no turns": (
        lambda a, b, c: lax.scan(lambda *_: (b, None), a, None, length=0)[0],
        [{0}],
    ),
    "scan outputs": (
        lambda a, b, c: lax.scan(lambda carry, x: (carry, x + c), a, b[None]),
        [{0}, {1, 2}],
    ),
    "while": (
        lambda a, b, c: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * s[2], s[2] + 1), (a, b, c)
        ),
        [{0}, {0, 1, 2}, {0, 2}],
    ),
    "while bound from outside": (
        lambda a, b, c: lax.while_loop(lambda s: s < c, lambda s: s * b, a),
        [{0, 1, 2}],
    ),
    "fori_loop": (
        lambda a, b, c: lax.fori_loop(0, 4, lambda _, s: s + b, a),
        [{0, 1}],
    ),
    "grad": (lambda a, b, c: jax.grad(lambda x: x * b)(a), [{1}]),
    "an unknown primitive": (
        lambda a, b, c: lax.custom_linear_solve(
            lambda v: v * a, b, lambda matvec, y: y / a, symmetric=True
        ),
        [{0, 1}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_marks_follow_values(name):
    fn, expected = CASES[name]
    assert depends(fn, 1.0, 2.0, 3.0) == expected


def test_a_chain_of_carries_needs_as_many_turns_as_it_is_long():
    def shift(carry, _):
        return (*carry[1:], carry[-1]), None

    def fn(*values):
        return lax.scan(shift, values, None, length=9)[0]

    # The first value is gone after one turn.
    assert depends(fn, *map(float, range(9)))[0] == set(range(1, 9))


def test_every_nested_jaxpr_is_found():
    def fn(x):
        return lax.cond(
            x > 0, jnp.sin, lambda y: lax.fori_loop(0, 3, lambda _, z: z * y, y), x
        )

    jaxpr = jax.make_jaxpr(fn)(1.0).jaxpr
    [branches] = [sub_jaxprs(e) for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert len(branches) == 2
    assert find_equation(jaxpr, lambda eqn: eqn.primitive.name == "sin")
    assert find_equation(jaxpr, lambda eqn: eqn.primitive.name == "mul")
    assert not find_equation(jaxpr, lambda eqn: eqn.primitive.name == "cos")


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.psum(x, "replica"),
        lambda x: lax.all_gather(x, "replica"),
        lambda x: lax.axis_index("replica"),
        lambda x: lax.ppermute(x, "replica", [(0, 1)]),
    ],
)
def test_collectives_know_their_axis(collective):
    spec = jax.sharding.PartitionSpec("replica")
    fn = jax.shard_map(
        lambda x: collective(x).reshape(-1),
        mesh=replica_mesh(2),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(fn)(jnp.ones(2)).jaxpr
    assert find_equation(jaxpr, lambda eqn: over_axis(eqn, "replica"))
    assert not find_equation(jaxpr, lambda eqn: over_axis(eqn, "model"))


def test_a_sum_over_array_axes_is_no_collective():
    jaxpr = jax.make_jaxpr(lambda x: x.sum(0))(jnp.ones((2, 3))).jaxpr
    assert not find_equation(jaxpr, lambda eqn: over_axis(eqn, "replica"))
