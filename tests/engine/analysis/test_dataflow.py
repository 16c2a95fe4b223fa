"""Marks flow through every kind of equation, and only where values do."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import run_state

from replicator.base.mesh import replica_mesh
from replicator.engine.analysis.dataflow import (
    DependsOn,
    find_equation,
    flow,
    over_axis,
    sub_jaxprs,
)


def depends(fn, *arguments):
    """Tell, for each output of `fn`, the numbers of the arguments behind it."""
    jaxpr = jax.make_jaxpr(fn)(*map(jnp.float32, arguments)).jaxpr
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
    "a reduction by a combiner of one's own": (
        lambda a, b, c: lax.reduce(
            (a[None], b[None]), (c, c), lambda x, y: (x[0] + y[1], y[0]), (0,)
        ),
        [{0, 1, 2}, {0, 1, 2}],
    ),
    "a barrier": (lambda a, b, c: lax.optimization_barrier((a, b, c)), [{0}, {1}, {2}]),
    "a sort": (
        lambda a, b, c: lax.sort((a[None], b[None], c[None]), num_keys=2),
        [{0, 1}, {0, 1}, {0, 1, 2}],
    ),
    "a linear solve": (
        lambda a, b, c: lax.custom_linear_solve(
            lambda v: v * a, b, lambda matvec, y: y / a, symmetric=True
        ),
        [{0, 1}],
    ),
}


def written(write):
    """Return a function of a mutable array that holds a, and b and c; it reads it."""

    def fn(a, b, c):
        ref = jax.new_ref(a)
        write(ref, b, c)
        return ref[...]

    return fn


def put(ref, value):
    ref[...] = value


def put_and_return(ref, value, result):
    ref[...] = value
    return result


def read_then_write(ref, b, c):
    other = jax.new_ref(ref[...] + c)
    ref[...] = b
    other[...] = 2.0


ARRAYS = {
    "nothing": (lambda ref, b, c: None, {0}),
    "all of it": (lambda ref, b, c: put(ref, b), {1}),
    "a part of it": (lambda ref, b, c: jax.ref.addupdate(ref, ..., b), {0, 1}),
    "what was in it": (
        lambda ref, b, c: put(ref, jax.ref.swap(ref, ..., b) + c),
        {0, 2},
    ),
    "another": (read_then_write, {1}),
    "in a call": (lambda ref, b, c: jax.jit(put)(ref, b), {1}),
    "in one branch": (
        lambda ref, b, c: lax.cond(c > 0, lambda: put(ref, b), lambda: None),
        {0, 1, 2},
    ),
    "in a scan": (
        lambda ref, b, c: lax.scan(
            lambda k, x: put_and_return(ref, ref[...] * x, (k, None)), 0.0, b[None]
        ),
        {0, 1},
    ),
    "in all turns of a scan": (
        lambda ref, b, c: lax.scan(
            lambda k, x: put_and_return(ref, x, (k, None)), 0.0, b[None]
        ),
        {1},
    ),
    "in a while": (
        lambda ref, b, c: lax.while_loop(
            lambda k: k < c, lambda k: put_and_return(ref, b, k + 1), 0.0
        ),
        {0, 1, 2},
    ),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_mark_of_a_mutable_array_is_that_of_what_was_written(name):
    write, expected = ARRAYS[name]
    assert depends(written(write), 1.0, 2.0, 3.0) == [expected]


def test_an_element_that_is_written_leaves_the_others():
    def fn(a, b, c):
        ref = jax.new_ref(jnp.stack([a, a]))
        ref[c.astype(int)] = b
        return ref[0], ref[c.astype(int)]

    assert depends(fn, 1.0, 2.0, 3.0) == [{0, 1, 2}, {0, 1, 2}]


def test_a_state_that_is_run_returns_what_its_arrays_hold():
    def body(refs):
        refs[0][...] = refs[1][...] * 2
        refs[2][...] += refs[2][...]

    def fn(a, b, c):
        return run_state(body)((a, b, c))

    assert depends(fn, 1.0, 2.0, 3.0) == [{1}, {1}, {2}]


def test_what_a_body_makes_of_no_input_reaches_all_outputs():
    class Inside(DependsOn):
        def decide(self, eqn, marks):
            return [frozenset({9})] if eqn.primitive.name == "sin" else None

    def fn(a):
        return lax.reduce(a, 0.0, lambda x, y: jnp.sin(x), (0,))

    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3)).jaxpr
    assert flow(jaxpr, [frozenset({0})], Inside()) == [{0, 9}]


@pytest.mark.parametrize("name", CASES)
def test_marks_follow_values(name):
    fn, expected = CASES[name]
    assert depends(fn, 1.0, 2.0, 3.0) == expected


def test_a_chain_of_carries_needs_as_many_turns_as_it_is_long():
    def shift(carry, _):
        return (*carry[1:], carry[-1]), None

    def fn(*values):
        _, seen = lax.scan(lambda c, _: (shift(c, _)[0], c), values, None, length=9)
        return seen[0]

    assert depends(fn, *map(float, range(9))) == [set(range(9))]


def test_what_the_first_turns_of_a_scan_lose_is_gone():
    def turn(carry, c):
        return (carry[1], carry[2], c), None

    def fn(a, b, c):
        return lax.scan(turn, (a, b, a), jnp.stack([c] * 3))[0][0]

    assert depends(fn, 1.0, 2.0, 3.0) == [{2}]


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
