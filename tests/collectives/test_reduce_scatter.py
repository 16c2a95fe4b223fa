import numpy as np
import pytest

from replicator.collectives import all_gather, all_reduce, reduce_scatter
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

X = np.random.default_rng(0).normal(size=(8, 16, 3)).astype(np.float32)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gathering_the_slices_gives_the_all_reduce(op):
    gathered, reduced = on_replicas(
        lambda x: (all_gather(reduce_scatter(x, op), tiled=True), all_reduce(x, op)), X
    )
    np.testing.assert_allclose(gathered, reduced, rtol=1e-5, atol=1e-6)


def test_groups_scatter_among_themselves():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    found = on_replicas(lambda x: reduce_scatter(x, "sum", groups=groups), X)
    expected = np.concatenate([X[group].sum(0).reshape(4, 4, 3) for group in groups])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_does_not_divide_is_refused_by_name():
    with pytest.raises(ArgumentError) as caught:
        on_replicas(lambda x: reduce_scatter({"w": x, "b": x[:12]}), X)
    assert str(caught.value) == (
        "`tree` must have an axis 0 that divides by 8 replicas, got float32[12,3] "
        "(leaf `b`). Pad the leaf."
    )


def test_other_reductions_are_refused():
    with pytest.raises(ArgumentError, match="`op` must be one of 'sum', 'mean', got"):
        reduce_scatter(X, "max")


def test_the_mean_of_integers_is_refused():
    with pytest.raises(ArgumentError, match=r"floating-point .* int32\[4\]"):
        reduce_scatter(np.ones(4, np.int32))
