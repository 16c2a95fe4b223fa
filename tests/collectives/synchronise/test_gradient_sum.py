import jax
import numpy as np
import pytest

from replicator.collectives.context.axes import resolve_axis
from replicator.collectives.synchronise.gradient_sum import exact_sum, lossy_sum
from replicator.collectives.synchronise.method import SumMethod
from tests.helpers import on_replicas, primitive_counts

FORMS = ["bf16", "f16", "int8"]
WAYS = {
    "all_reduce": {},
    "hierarchical": {"synchronise": "hierarchical", "devices_per_host": 2},
}


def method(way, form=None):
    return SumMethod(compress=form, **WAYS[way])


def summed(way, form):
    """Return a function of one replica: its sum, and what it owes."""

    def fn(share):
        axis = resolve_axis("replica")
        return lossy_sum(share, method(way, form), axis, dtype=share.dtype)[:2]

    return fn


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_float32_adds_what_travels_narrow(way, form):
    each = np.array([256, 2, 1, 1, 1, 1, 1, 1], np.float32) / 8
    rows = np.tile(each[:, None], (1, 4096))
    total, owed = on_replicas(summed(way, form), rows)
    # int8 has no 33 in steps of 33/127, but the same number everywhere.
    np.testing.assert_allclose(total, 33, rtol=0 if form != "int8" else 1e-6)
    np.testing.assert_allclose(total[0] + owed.sum(0), 33, rtol=1e-6)


@pytest.mark.parametrize(
    ("way", "n"), [("all_reduce", 2), ("all_reduce", 8), ("hierarchical", 8)]
)
@pytest.mark.parametrize("form", FORMS)
def test_what_came_and_what_is_owed_are_what_was_given(way, form, n):
    rows = normal(n, 33, 70)
    total, owed = on_replicas(summed(way, form), rows, n=n)
    assert (np.asarray(total) == np.asarray(total[:1])).all()
    np.testing.assert_allclose(total[0] + owed.sum(0), rows.sum(0), atol=2e-5)
    assert np.abs(total[0] - rows.sum(0)).max() < 0.2


@pytest.mark.parametrize("form", FORMS)
def test_zeros_are_exact(form):
    zeros = np.zeros((2, 64, 64), np.float32)
    total, owed = on_replicas(summed("all_reduce", form), zeros, n=2)
    assert not np.any(total)
    assert not np.any(owed)


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_number_passes(form):
    rows, bad = normal(8, 1024, 4), [np.nan, np.inf, -np.inf]
    rows[3, [0, 400, 800], 2] = bad
    total, _ = on_replicas(summed("all_reduce", form), rows)
    assert not np.isfinite(total[:, [0, 400, 800], 2]).any()
    assert np.isfinite(total[:, 600]).all()


def test_what_float16_cannot_hold_is_owed():
    rows = np.full((8, 64), 1e5, np.float32)
    total, owed = on_replicas(summed("all_reduce", "f16"), rows)
    assert np.isfinite(total).all()
    np.testing.assert_allclose(total[0] + owed.sum(0), 8e5, rtol=1e-6)


@pytest.mark.parametrize(("n", "shape"), [(1, (3,)), (2, (3,)), (4, ()), (8, (33, 7))])
def test_hosts_add_up_what_all_add_up(n, shape):
    rows = normal(n, *shape)
    exact = on_replicas(
        lambda x: exact_sum(x, method("hierarchical"), resolve_axis("replica")),
        rows,
        n=n,
    )
    np.testing.assert_allclose(exact[0], rows.sum(0), rtol=1e-5, atol=1e-6)
    assert (np.asarray(exact) == np.asarray(exact[:1])).all()


def test_hosts_add_integers_up():
    rows = np.arange(24, dtype=np.int32).reshape(8, 3)
    exact = on_replicas(
        lambda x: exact_sum(x, method("hierarchical"), resolve_axis("replica")), rows
    )
    assert exact[5].tolist() == rows.sum(0).tolist()


def test_double_precision_keeps_its_error():
    with jax.enable_x64(True):
        rows = normal(8, 64, 64).astype(np.float64)
        total, owed = on_replicas(summed("all_reduce", "int8"), rows)
        total, owed = np.asarray(total), np.asarray(owed)
    assert total.dtype == np.float64
    np.testing.assert_allclose(total[0] + owed.sum(0), rows.sum(0), atol=1e-14)


def test_each_replica_sends_two_narrow_arrays():
    counts = primitive_counts(summed("all_reduce", "int8"), normal(8, 64, 64))
    assert counts["all_to_all"] == counts["all_gather"] == 1
    assert counts["psum"] == 0
