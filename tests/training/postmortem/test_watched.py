"""Where a number first went bad: the primitive, the line, the turn of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicator.training.postmortem.watched import NEVER, first_bad, watched


def look(fn, *arguments, kind=0):
    """Run `fn` watched, and return where the first NaN (or infinity) began."""
    run, places, _ = watched(fn, *arguments)
    outs, when = jax.jit(run)(*jax.tree.leaves(arguments))
    expected = jax.tree.leaves(fn(*arguments))
    for out, other in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(out), np.isnan(other))
        np.testing.assert_allclose(np.nan_to_num(out), np.nan_to_num(other), rtol=1e-5)
    return first_bad(places, np.asarray(when), kind)


def test_a_clean_function_has_no_bad_place():
    assert look(lambda x: jnp.exp(x).sum(), jnp.ones(3)) is None


def test_the_first_of_several_is_named_with_its_line():
    def fn(x):
        y = jnp.sqrt(x)  # here
        return jnp.log(y) * 2

    found = look(fn, jnp.asarray([-1.0, 1.0]))
    assert found.place.primitive == "sqrt"
    assert __file__ in found.place.line
    assert found.describe().startswith(f"`sqrt` at {__file__}:")


def test_gradients_are_looked_into():
    found = look(jax.grad(lambda x: jnp.sqrt(x).sum()), jnp.zeros(3), kind=1)
    assert found.place.primitive == "div"


def test_a_mask_of_minus_infinity_is_no_fault():
    def fn(x):
        masked = jnp.where(x > 0, x, -jnp.inf)
        return jax.nn.softmax(masked)

    assert look(fn, jnp.asarray([1.0, -1.0]), kind=0) is None
    assert look(fn, jnp.asarray([1.0, -1.0]), kind=1) is None


def test_the_infinity_that_led_to_a_nan_is_told():
    def fn(x):
        y = 1 / x
        return y - y

    assert look(fn, jnp.zeros(2), kind=1).place.primitive == "div"
    assert look(fn, jnp.zeros(2), kind=0).place.primitive == "sub"


@pytest.mark.parametrize("reverse", [False, True])
def test_the_turn_of_a_loop_is_told(reverse):
    def fn(xs):
        def turn(total, x):
            return total + jnp.log(x), total

        return lax.scan(turn, 0.0, xs, reverse=reverse)

    found = look(fn, jnp.asarray([1.0, 1.0, -1.0, 1.0, 1.0, -1.0]))
    assert found.place.primitive == "log"
    assert (found.turn, found.place.turns) == (0 if reverse else 2, 6)
    assert found.describe().endswith(f"turn {found.turn} of 6")


def with_own_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvps(lambda tangent, out, x: tangent)
    return wrapped


def with_own_vjp(fn):
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda x: (fn(x), None), lambda _, cotangent: (cotangent,))
    return wrapped


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, with_own_jvp, with_own_vjp])
def test_calls_are_opened(wrap):
    def inner(x):
        return jnp.log(x)

    assert look(wrap(inner), -jnp.ones(2)).place.primitive == "log"


@pytest.mark.parametrize("kind", ["cond", "while", "scan in scan"])
def test_what_is_not_opened_is_one_place(kind):
    def fn(x):
        if kind == "cond":
            return lax.cond(x.sum() < 0, jnp.log, jnp.exp, x)
        if kind == "while":
            return lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.log(c[1])), (0, x)
            )

        def outer(c, _):
            return lax.scan(lambda c, _: (jnp.log(c), None), c, None, length=2)[0], None

        return lax.scan(outer, x, None, length=2)

    assert look(fn, -jnp.ones(2)).place.primitive in kind


def test_integers_and_keys_pass():
    def fn(seed, x):
        key = jax.random.key(seed)
        return jax.random.normal(key, x.shape) + x, jnp.argmax(x)

    assert look(fn, np.int32(3), jnp.ones(4)) is None


def test_a_function_without_floats_has_no_places():
    run, places, _ = watched(lambda x: x + 1, jnp.arange(3))
    assert places == []
    assert run(jnp.arange(3))[1].shape == (0, 2)
    assert NEVER > 2**30
