import jax.numpy as jnp
import numpy as np
import pytest

from replicator.collectives.context.axes import resolve_axis
from replicator.collectives.synchronise.rows import rows_sum
from tests.helpers import on_replicas


def tables(n, rows, shape=(64, 5), seed=0):
    """Return a table of each replica in which so many rows are not zero."""
    rng = np.random.default_rng(seed)
    found = np.zeros((n, *shape), np.float32)
    for table in found:
        table[rng.choice(shape[0], rows, replace=False)] = rng.normal(
            size=(rows, *shape[1:])
        )
    return found


def summed(tables, most_rows):
    return on_replicas(
        lambda leaf: rows_sum(leaf, most_rows, resolve_axis("replica")),
        tables,
        n=len(tables),
    )


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("shape", [(64,), (64, 5), (64, 2, 3)])
def test_rows_add_up_to_the_whole(n, shape):
    given = tables(n, 7, shape)
    found = summed(given, 9)
    np.testing.assert_allclose(found[n - 1], given.sum(0), atol=1e-6)
    assert (np.asarray(found) == np.asarray(found[:1])).all()


def test_rows_of_zero_stay_zero():
    assert not np.any(summed(np.zeros((2, 16, 4), np.float32), 3))


def test_the_last_row_is_one():
    given = np.zeros((2, 16, 4), np.float32)
    given[:, 15] = 2.0
    assert summed(given, 3)[0][15].tolist() == [4.0] * 4


def test_a_bad_number_passes():
    given = tables(2, 7)
    row = np.argmax(np.any(given[1], axis=1))
    given[1][row, 2] = np.nan
    assert jnp.isnan(summed(given, 7)[0][row, 2])
