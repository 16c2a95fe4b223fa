import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.collectives import map_gather, map_reduce
from replicator.errors import ArgumentError
from tests.helpers import on_replicas, primitive_counts

RNG = np.random.default_rng(0)
ANYTHING = np.ones(8, np.float32)


def matrix(size):
    return (np.eye(size) * size + RNG.normal(size=(size, size))).astype(np.float32)


MATRICES = [matrix(size) for size in (3, 5, 3, 3, 5, 4, 3, 3, 3, 3, 3, 3, 3)]


@pytest.mark.parametrize("n", [1, 2, 8])
def test_inverses_of_several_shapes_come_back_in_order(n):
    found = on_replicas(
        lambda _: map_gather(jnp.linalg.inv, MATRICES), ANYTHING[:n], n=n
    )
    for inverses, item in zip(found, MATRICES, strict=True):
        for inverse in inverses:
            np.testing.assert_allclose(
                inverse, np.linalg.inv(item), rtol=1e-3, atol=1e-5
            )


def test_items_and_results_may_be_trees():
    items = [{"a": np.full(2, i, np.float32), "n": i} for i in range(11)]
    found = on_replicas(
        lambda _: map_gather(lambda item: (item["a"] * 2, item["n"] + 1), items),
        ANYTHING,
    )
    assert [doubled[7, 0] for doubled, _ in found] == [2 * i for i in range(11)]
    assert [plus_one[7] for _, plus_one in found] == [i + 1 for i in range(11)]


@pytest.mark.parametrize(("n", "share"), [(2, 9), (8, 3)])
def test_no_replica_computes_more_than_its_share(n, share):
    calls = []

    def counted(item):
        jax.debug.callback(lambda _: calls.append(1), item)
        return item

    jax.block_until_ready(
        on_replicas(lambda _: map_gather(counted, [1.0] * 17), ANYTHING[:n], n=n)
    )
    jax.effects_barrier()
    assert len(calls) == n * share


def test_padding_is_the_given_filler():
    seen = []

    def noted(item):
        jax.debug.callback(lambda value: seen.append(float(value)), item)
        return item

    on_replicas(lambda _: map_gather(noted, [1.0, 2.0, 3.0], pad=9.0), ANYTHING)
    jax.effects_barrier()
    assert sorted(seen) == [1, 2, 3, 9, 9, 9, 9, 9]


def test_a_filler_may_be_made_per_shape():
    def identity_like(item):
        return jnp.eye(len(item))

    found = on_replicas(
        lambda _: map_gather(jnp.linalg.inv, MATRICES, pad=identity_like), ANYTHING
    )
    np.testing.assert_allclose(
        found[1][0], np.linalg.inv(MATRICES[1]), rtol=1e-3, atol=1e-5
    )


NUMPY = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "min": np.min,
    "product": np.prod,
}


@pytest.mark.parametrize("op", NUMPY)
@pytest.mark.parametrize("count", [1, 8, 11])
def test_map_reduce_equals_numpy_and_padding_does_not_count(op, count):
    items = RNG.uniform(0.5, 1.5, size=(count, 4)).astype(np.float32)
    expected = NUMPY[op](items**2, axis=0)
    # A filler that would win any maximum, spoil any sum and turn any product.
    reduce = functools.partial(
        map_reduce, jnp.square, list(items), op=op, pad=np.full(4, -9e9, np.float32)
    )
    np.testing.assert_allclose(reduce(), expected, rtol=1e-5)
    found = on_replicas(lambda _: reduce(), ANYTHING)
    np.testing.assert_allclose(found, np.broadcast_to(expected, (8, 4)), rtol=1e-5)


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_map_reduce_keeps_integers(op):
    items = list(np.array([3, -4, 5], np.int8))
    found = on_replicas(lambda _: map_reduce(lambda x: x, items, op=op), ANYTHING)
    assert found.dtype == jnp.int8
    assert found.tolist() == [NUMPY[op](items)] * 8


def test_map_reduce_takes_items_of_several_shapes():
    found = on_replicas(lambda _: map_reduce(jnp.trace, MATRICES), ANYTHING)
    expected = sum(np.trace(item) for item in MATRICES)
    np.testing.assert_allclose(found, np.full(8, expected), rtol=1e-5)


def test_map_reduce_gathers_nothing():
    counts = primitive_counts(lambda _: map_reduce(jnp.trace, MATRICES), ANYTHING)
    assert (counts["psum"], counts["all_gather"]) == (1, 0)


def test_any_and_all_over_items():
    flags = [np.bool_(flag) for flag in (False, True, False)]
    for op, expected in (("max", True), ("min", False)):
        found = on_replicas(
            lambda _, op=op: map_reduce(lambda x: x, flags, op=op), ANYTHING
        )
        assert found.tolist() == [expected] * 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: map_gather(jnp.sin, []),
            "`items` must hold at least one work item, got none. Leave out the call.",
        ),
        (
            lambda: map_gather(dict, [{"x": 1.0}], pad={"x": np.zeros(2, np.float32)}),
            "`pad` must have the structure, shapes and dtypes of the item it stands "
            "for, got a filler where `x` is float32[2] instead of float32[]. Leave it "
            "out to repeat an item.",
        ),
        (
            lambda: map_gather(jnp.sin, MATRICES, pad=MATRICES[0]),
            "`pad` must be a function of an item for items of 3 shapes, got one "
            "filler. Pass `lambda item: …` that returns a filler of its shape.",
        ),
        (
            lambda: map_reduce(lambda item: {"sin": jnp.sin(item)}, MATRICES),
            "`fn` must return the same shapes for every item, got a result where `sin` "
            "is float32[5,5] instead of float32[3,3]. Use `map_gather` for results "
            "that differ.",
        ),
        (
            lambda: map_reduce(jnp.sin, [1.0], op="median"),
            "`op` must be one of 'sum', 'mean', 'max', 'min', 'product', got 'median'. "
            "Use one of these.",
        ),
        (
            lambda: map_reduce(lambda x: x, [1], op="mean"),
            "`fn` must return floating-point leaves for `op='mean'`, got int32[]. Cast "
            "the leaf first, or leave it out.",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == message
