import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.collectives import all_reduce, replica_id
from replicator.errors import ArgumentError
from tests.helpers import on_replicas, primitive_counts

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
UNEQUAL = [[0], [1, 2], [3, 4, 5, 6, 7]]


def by_groups(reduce, x, groups):
    out = np.empty_like(x)
    for group in groups:
        out[group] = reduce(x[group], axis=0)
    return out


@pytest.mark.parametrize(
    ("op", "oracle"),
    [("sum", np.sum), ("mean", np.mean), ("max", np.max), ("min", np.min)],
)
def test_unequal_groups_equal_numpy(op, oracle):
    found = on_replicas(lambda x: all_reduce(x, op, groups=UNEQUAL), X)
    np.testing.assert_allclose(found, by_groups(oracle, X, UNEQUAL), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "oracle"),
    [({"op": "product"}, np.prod), ({"reduction": "ordered"}, np.mean)],
)
def test_gathering_reductions_take_equal_groups(options, oracle):
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    found = on_replicas(lambda x: all_reduce(x, groups=groups, **options), X)
    np.testing.assert_allclose(found, by_groups(oracle, X, groups), rtol=1e-6)
    with pytest.raises(ArgumentError, match="`groups` must be equally large"):
        on_replicas(lambda x: all_reduce(x, groups=UNEQUAL, **options), X)


def test_weighted_mean_in_unequal_groups():
    weights = np.arange(8, dtype=np.float32)
    found = on_replicas(
        lambda x, w: all_reduce(x, weight=w, groups=UNEQUAL), X, weights
    )
    for group in UNEQUAL[1:]:
        expected = np.average(X[group], axis=0, weights=weights[group])
        np.testing.assert_allclose(found[group[0]], expected, rtol=1e-5)
    assert found[0].tolist() == [0, 0, 0]


def test_a_mean_without_any_weight_is_zero_and_so_is_its_gradient():
    def loss(x, weight):
        return all_reduce(x, weight=weight).sum()

    value, gradients = on_replicas(
        jax.value_and_grad(loss, argnums=(0, 1)), X, np.zeros(8, np.float32)
    )
    assert not np.any(value)
    assert not np.any(gradients[0])
    assert not np.any(gradients[1])
    assert all_reduce(5.0, weight=0.0) == 0
    assert all_reduce(5.0, weight=3) == 5


def test_gradient_in_the_weight_is_right_at_weight_zero():
    x = np.array([2.0, 5.0], np.float32)
    gradient = jax.grad(lambda w, x: all_reduce(x, weight=w))
    found = on_replicas(gradient, np.array([0, 4], np.float32), x, n=2)
    # Both replicas hold the mean: 2 · (x − mean) / total weight.
    np.testing.assert_allclose(found, 2 * (x - 5) / 4, rtol=1e-6)


def test_a_replica_without_weight_does_not_count_even_by_a_nan():
    x, weights = np.arange(1.0, 9.0, dtype=np.float32), np.ones(8, np.float32)
    x[3], weights[3] = np.nan, 0
    found = on_replicas(lambda x, w: all_reduce(x, weight=w), x, weights)
    np.testing.assert_allclose(found, np.full(8, np.nanmean(x)), rtol=1e-6)
    assert np.isnan(on_replicas(lambda x: all_reduce(x, weight=1.0), x)).all()


def test_large_weights_neither_overflow_nor_round_small_dtypes():
    weights = np.array([100_001, 300_003], np.float32)
    x = jnp.array([1, 2], jnp.float16)
    found = on_replicas(lambda x, w: all_reduce(x, weight=w), x, weights, n=2)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, np.float16(1.75), rtol=1e-3)


def test_ties_share_the_gradient_of_max_equally():
    x = np.array([1, 3, 3, 2, 3, 0, 1, 1], np.float32)
    # Each of the 8 replicas holds the maximum once: a gradient of 8 over 3 winners.
    gradient = on_replicas(jax.grad(lambda x: all_reduce(x, "max")), x)
    np.testing.assert_allclose(gradient, 8 / 3 * (x == 3), rtol=1e-6)


def test_max_and_min_of_booleans_are_any_and_all():
    x = np.arange(8) == 3
    any_, all_ = on_replicas(lambda x: (all_reduce(x, "max"), all_reduce(x, "min")), x)
    assert any_.all()
    assert any_.dtype == bool
    assert not all_.any()


def test_min_of_integers_keeps_the_smallest_of_their_range():
    x = np.array([-128, 127, 0, 1, 2, 3, 4, 5], np.int8)
    assert on_replicas(lambda x: all_reduce(x, "min"), x).tolist() == [-128] * 8


def test_max_moves_no_more_than_one_collective_forward():
    counts = primitive_counts(lambda x: all_reduce(x, "max"), X)
    assert (counts["pmax"], counts["psum"], counts["all_gather"]) == (1, 0, 0)


def test_a_python_number_is_reduced_too():
    found = on_replicas(lambda _: all_reduce({"n": 2.5}, "sum")["n"], X)
    assert found.tolist() == [20] * 8


@pytest.mark.parametrize(
    ("tree", "options", "message"),
    [
        (
            1.0,
            {"op": "avg"},
            "`op` must be one of 'sum', 'mean', 'max', 'min', 'product', got 'avg'. "
            "Use one of these.",
        ),
        (
            1.0,
            {"reduction": "exact"},
            "`reduction` must be one of 'fast', 'ordered', got 'exact'. "
            "Use one of these.",
        ),
        (
            1.0,
            {"op": "max", "reduction": "ordered"},
            "`op` must be 'sum' or 'mean' for `reduction='ordered'`, got 'max'. "
            "Leave `reduction` out.",
        ),
        (
            1.0,
            {"op": "sum", "weight": 1.0},
            "`weight` must come with `op='mean'`, got `op='sum'`. Multiply the leaves "
            "by the weight instead.",
        ),
        (
            1.0,
            {"weight": np.ones(3, np.float32)},
            "`weight` must be one real number per replica, got float32[3]. Weigh and "
            "sum the examples of a replica before the call.",
        ),
        (
            {"opt": {"count": np.int32(1)}},
            {},
            "`tree` must hold floating-point leaves for `op='mean'`, got int32[] (leaf "
            "`opt/count`). Cast the leaf first, or leave it out.",
        ),
        (
            np.bool_(True),
            {"op": "sum"},
            "`tree` must hold numbers for `op='sum'`, got bool[]. Cast the leaf first, "
            "or leave it out.",
        ),
    ],
)
def test_wrong_arguments_are_refused(tree, options, message):
    with pytest.raises(ArgumentError) as caught:
        all_reduce(tree, **options)
    assert str(caught.value) == message


def test_a_traced_weight_is_accepted_per_replica():
    found = on_replicas(lambda x: all_reduce(x, weight=replica_id()), X)
    np.testing.assert_allclose(
        found[0], np.average(X, axis=0, weights=np.arange(8)), rtol=1e-5
    )
