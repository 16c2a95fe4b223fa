import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from replicator.collectives.synchronise.power_sgd import first_factor, low_rank_sum
from tests.helpers import on_replicas

RANK = 3


def sum_all(x):
    return lax.psum(x, "replica")


def summed(rows, factor, n=8):
    """Return sum, debts and factor, of all replicas."""
    return on_replicas(
        lambda share: low_rank_sum(share, jnp.asarray(factor), sum_all), rows, n=n
    )


@pytest.fixture
def factor():
    return np.asarray(first_factor("params/w", jnp.ones((40, 24)), RANK))


def of_rank(rank, n=8, seed=0):
    """Return a matrix of each replica, whose sum has such a rank."""
    rng = np.random.default_rng(seed)
    left = rng.normal(size=(n, 40, rank))
    return np.float32(left @ rng.normal(size=(rank, 24)))


def test_a_lower_rank_than_asked_is_exact(factor):
    # Also from the factor of a matrix of a lower rank, or of zeros.
    rows = np.stack([of_rank(r, n=2, seed=r) for r in (1, 0, 3, 2)], axis=1)

    def one_by_one(shares):
        def send(factor, share):
            total, _, factor = low_rank_sum(share, factor, sum_all)
            return factor, total

        return lax.scan(send, jnp.asarray(factor), shares)[1]

    found, true = on_replicas(one_by_one, rows, n=2)[0], rows.sum(0)
    apart = np.linalg.norm(found - true, axis=(1, 2))
    assert (apart <= 1e-5 * np.linalg.norm(true, axis=(1, 2))).all()


def test_what_came_and_what_is_owed_are_what_was_given(factor):
    rows = np.float32(np.random.default_rng(0).normal(size=(8, 5, 8, 24)))
    total, owed, _ = summed(rows, factor)
    assert (np.asarray(total) == np.asarray(total[:1])).all()
    np.testing.assert_allclose(total[0] + owed.sum(0), rows.sum(0), atol=2e-5)


def test_a_warm_start_finds_the_best_rank(factor):
    rows = np.float32(np.random.default_rng(0).normal(size=(2, 40, 24)))
    _, sizes, _ = np.linalg.svd(rows.sum(0))

    def repeated(share):
        def again(factor, _):
            total, _, factor = low_rank_sum(share, factor, sum_all)
            return factor, jnp.linalg.norm(sum_all(share) - total)

        return lax.scan(again, jnp.asarray(factor), length=30)[1]

    misses = on_replicas(repeated, rows, n=2)[0]
    assert misses[-1] < 1.01 * np.linalg.norm(sizes[RANK:]) < misses[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_passes(factor, bad):
    rows = of_rank(2, n=2)
    rows[1, 5, 7] = bad
    total, _, _ = summed(rows, factor, n=2)
    assert not np.isfinite(total).all()


def test_the_first_factor_follows_from_the_path():
    w = jnp.ones((40, 24))
    one, same, other = (first_factor(p, w, RANK) for p in ("a/w", "a/w", "b/w"))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert jax.numpy.linalg.matrix_rank(one) == RANK
