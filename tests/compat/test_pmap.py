"""`compat.pmap` does what `pmap` did, says what is wrong, and does not run away."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.compat import pmap
from replicator.errors import ArgumentError


def rows(*shape):
    return np.arange(np.prod((8, *shape)), dtype=np.float32).reshape((8, *shape))


CASES = {
    "collectives by the user's name": (
        lambda p: p(lambda x: x / jax.lax.psum(x, "batch"), axis_name="batch"),
        (rows() + 1,),
    ),
    "groups": (
        lambda p: p(
            lambda x: jax.lax.psum(
                x, "i", axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
            ),
            "i",
        ),
        (rows(),),
    ),
    "ring": (
        lambda p: p(
            lambda x: jax.lax.ppermute(x, "i", [(i, (i + 1) % 8) for i in range(8)]),
            "i",
        ),
        (rows(),),
    ),
    "index": (lambda p: p(lambda x: (x, jax.lax.axis_index("i")), "i"), (rows(),)),
    "a tree, and one that all get": (
        lambda p: p(lambda x, w: x["a"] @ w["w"], in_axes=(0, None)),
        ({"a": rows(2)}, {"w": np.ones((2, 3), np.float32)}),
    ),
    "another axis": (
        lambda p: p(lambda x: x * 2, in_axes=1, out_axes=1),
        (np.ones((3, 8), np.float32),),
    ),
    "no axis in the result": (
        lambda p: p(lambda x: jax.lax.pmean(x, "i"), "i", out_axes=None),
        (rows(3),),
    ),
    "axes for each result": (
        lambda p: p(
            lambda x: (jax.lax.psum(x, "i"), {"own": x}), "i", out_axes=(None, 0)
        ),
        (rows(3),),
    ),
    "a static argument": (
        lambda p: p(lambda n, x: x * n, static_broadcasted_argnums=0),
        (3, rows()),
    ),
    "static and axes": (
        lambda p: p(
            lambda x, n, w: x * n + w,
            in_axes=(0, None, None),
            static_broadcasted_argnums=(1,),
        ),
        (rows(), 3, np.float32(1)),
    ),
    "fewer rows than devices": (
        lambda p: p(lambda x: jax.lax.psum(x, "i"), "i"),
        (np.ones(3, np.float32),),
    ),
    "the gradient of one replica": (
        lambda p: p(lambda x: jax.grad(lambda w: w * x)(2.0), "i"),
        (rows(),),
    ),
    "a gradient through a mean": (
        lambda p: p(lambda x: jax.grad(lambda w: jax.lax.pmean(w * x, "i"))(2.0), "i"),
        (rows(),),
    ),
    "a scan from a constant": (
        lambda p: p(lambda x: jax.lax.scan(lambda c, z: (c + z, c), 0.0, x)[0], "i"),
        (rows(5),),
    ),
    "old random keys": (
        lambda p: p(lambda k: jax.random.uniform(k)),
        (np.asarray(jax.random.split(jax.random.PRNGKey(0), 8)),),
    ),
    "a constant": (lambda p: p(lambda x: 3.0), (rows(),)),
    "no result": (lambda p: p(lambda x: (None, x)), (rows(),)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_jax(case):
    make, args = CASES[case]
    ours, theirs = make(pmap)(*args), make(jax.pmap)(*args)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)


def test_typed_random_keys_are_rows_too(key):
    keys = jax.random.split(key, 8)
    split = pmap(lambda k: jax.random.split(k, 2))(keys)
    np.testing.assert_array_equal(
        jax.random.key_data(split[3]), jax.random.key_data(jax.random.split(keys[3], 2))
    )


def test_arguments_by_keyword_are_mapped_over_their_first_axis():
    assert pmap(lambda x, *, y: x + y)(rows(), y=rows())[3] == 6


def test_without_an_argument_the_axis_size_says_how_many():
    ids = pmap(lambda: jax.lax.axis_index("i"), "i", axis_size=8)()
    assert ids.tolist() == list(range(8))


def test_it_maps_over_the_given_devices():
    last = jax.devices()[-2:]
    out = pmap(lambda x: jax.lax.psum(x, "i"), "i", devices=last)(np.ones(2))
    assert out.sharding.device_set == set(last)


def test_it_is_differentiated_vmapped_and_compiled():
    total = pmap(lambda x: jax.lax.psum(x**2, "i"), "i")
    np.testing.assert_allclose(jax.grad(lambda x: total(x).sum())(rows()), 16 * rows())
    assert jax.vmap(total)(np.ones((2, 8), np.float32)).shape == (2, 8)
    assert jax.jit(total)(rows())[0] == 140


def test_a_method_is_mapped_with_its_object():
    class Model:
        scale = 3.0

        @functools.partial(pmap, static_broadcasted_argnums=0)
        def apply(self, x):
            return self.scale * x

    assert Model().apply(rows())[2] == 6


def test_it_is_traced_once_for_each_set_of_shapes():
    traces = []

    @pmap
    def step(x):
        traces.append(x.shape)
        return x + 1

    out = step(step(step(rows(2))))  # NumPy first, then what it returned
    step(jnp.asarray(rows(2)))
    step(rows(3))
    assert traces == [(2,), (3,)]
    assert len(out.addressable_shards) == 8


def test_donated_arguments_are_gone():
    step = pmap(lambda p, x: p + x, donate_argnums=0)
    state = pmap(lambda x: x)(rows(2))
    step(state, rows(2))
    assert state.is_deleted()


def test_what_lies_on_one_device_is_spread():
    committed = jax.device_put(rows(2), jax.devices()[3])
    np.testing.assert_array_equal(pmap(lambda x: x)(committed), rows(2))


def test_lower_shows_the_program():
    text = pmap(lambda x: jax.lax.psum(x, "i"), "i").lower(rows()).as_text()
    assert "all_reduce" in text


def test_what_was_lowered_and_compiled_is_called_as_what_was_mapped():
    @functools.partial(pmap, axis_name="i", static_broadcasted_argnums=1)
    def scaled(x, factor, *, shift):
        return {"sum": factor * jax.lax.psum(x, "i") + shift}

    compiled = scaled.lower(rows(), 3, shift=rows()).compile()
    found = compiled(rows(), shift=rows())
    expected = scaled(rows(), 3, shift=rows())
    np.testing.assert_array_equal(found["sum"], expected["sum"])
    assert "all-reduce" in compiled.as_text()
    with pytest.raises(ArgumentError, match="1 positional arguments, got 2"):
        compiled(rows(), 3, shift=rows())


def test_many_calls_with_a_donated_state_never_fill_the_pool():
    @functools.partial(pmap, axis_name="i", donate_argnums=0)
    def step(w, x):
        return w - 1e-3 * jax.lax.pmean(
            jax.grad(lambda w: jnp.tanh(x @ w).sum())(w), "i"
        )

    w = np.ones((8, 32, 32), np.float32)
    for _ in range(300):  # jax.pmap of 0.10 may abort the process here
        w = step(w, rows(4, 32))
    assert np.isfinite(w).all()


REFUSED = {
    "more rows than devices": (
        lambda: pmap(lambda x: x)(np.ones(9)),
        r"must be given at most 8 rows.* got 9\. Reshape to \[8, -1",
    ),
    "rows that do not agree": (
        lambda: pmap(lambda x, batch: x)(rows(), {"y": np.ones(4)}),
        r"`batch/y` must have 8 rows along axis 0, as `x` has, got shape \(4,\)",
    ),
    "a number without rows": (
        lambda: pmap(lambda x, scale: x)(rows(), 2.0),
        r"`scale` must have a device axis, axis 0, got shape \(\)\. Give `in_axes`",
    ),
    "nothing with rows": (
        lambda: pmap(lambda: 1)(),
        r"`axis_size` must be given .* Pass `axis_size=jax",
    ),
    "another axis size": (
        lambda: pmap(lambda x: x, axis_size=4)(rows()),
        r"`axis_size` must be the length of the device axis, 8, got 4",
    ),
    "too few axes": (
        lambda: pmap(lambda x, y: x, in_axes=(0,))(rows(), rows()),
        r"`in_axes` must have an entry for each of 2 .*, got 1",
    ),
    "axes of another tree": (
        lambda: pmap(lambda x: x, in_axes=({"a": 0},))({"b": rows()}),
        r"`in_axes` must be a prefix",
    ),
    "axes of another result": (
        lambda: pmap(lambda x: x, out_axes=(0, 0))(rows()),
        r"`out_axes` must be a prefix",
    ),
    "a negative axis": (
        lambda: pmap(lambda x: x, in_axes=-1),
        r"`in_axes` must hold whole numbers from 0 on, or None, got -1",
    ),
    "a backend": (
        lambda: pmap(lambda x: x, backend="cpu"),
        r"`backend` must be None, got 'cpu'\. Leave it out",
    ),
    "no function": (lambda: pmap(3), r"`fn` must be a function, got 3"),
    "a static array": (
        lambda: pmap(lambda x, n: x, static_broadcasted_argnums=1)(rows(), rows()),
        r"`static_broadcasted_argnums` must name hashable arguments",
    ),
    "a static argument by keyword": (
        lambda: pmap(lambda x, n: x, static_broadcasted_argnums=1)(rows(), n=1),
        r"`static_broadcasted_argnums` must be positions of positional arguments",
    ),
    "a position that is none": (
        lambda: pmap(lambda x: x, donate_argnums=-1),
        r"`donate_argnums` must be positions from 0 on, got -1",
    ),
    "other devices than rows": (
        lambda: pmap(lambda x: x, devices=jax.devices()[:2])(rows()),
        r"`devices` must have one device of this process for each row, got 2 for 8",
    ),
    "one inside another": (
        lambda: pmap(pmap(lambda x: x))(rows(2)),
        r"`pmap` must not be called inside another `pmap`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_by_name(case):
    call, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message):
        call()
