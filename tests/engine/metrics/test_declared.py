"""Metrics merge as declared: by weight, over microbatches and over replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator import Max, Mean, Min, PerReplica, Sum
from replicator.engine.metrics import declared as metrics
from replicator.errors import ArgumentError
from tests.helpers import on_replicas
from tests.steps import replicas

VALUES = np.asarray([3, 1, 4, 1, 5, 9, 2, 6], np.float32)
WEIGHTS = np.asarray([2, 7, 1, 8, 2, 8, 1, 8], np.float32)


def merged(make, *arrays):
    """Merge one metric over eight replicas; return what each replica holds."""
    return on_replicas(lambda *own: metrics.merge_replicas(make(*own)), *arrays)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Mean, VALUES.mean()),
        (Sum, VALUES.sum()),
        (Max, VALUES.max()),
        (Min, VALUES.min()),
    ],
)
def test_every_replica_gets_the_merged_value(make, expected):
    np.testing.assert_allclose(merged(make, VALUES), np.full(8, expected), rtol=1e-6)


def test_a_mean_counts_by_weight():
    expected = (VALUES * WEIGHTS).sum() / WEIGHTS.sum()
    np.testing.assert_allclose(merged(Mean, VALUES, WEIGHTS), [expected] * 8, rtol=1e-6)


def test_a_weight_may_be_an_integer():
    counts = WEIGHTS.astype(np.int32)
    expected = (VALUES * WEIGHTS).sum() / WEIGHTS.sum()
    np.testing.assert_allclose(merged(Mean, VALUES, counts), [expected] * 8, rtol=1e-6)


def test_a_replica_of_weight_zero_may_hold_nan():
    values, weights = VALUES.copy(), WEIGHTS.copy()
    values[2], weights[2] = np.nan, 0
    rest = np.arange(8) != 2
    expected = (VALUES * WEIGHTS)[rest].sum() / WEIGHTS[rest].sum()
    np.testing.assert_allclose(merged(Mean, values, weights), [expected] * 8, rtol=1e-6)


def test_no_weight_at_all_is_zero_and_no_nan():
    np.testing.assert_array_equal(merged(Mean, VALUES, 0 * WEIGHTS), np.zeros(8))


def test_plain_numbers_are_means_of_equal_weights():
    declared = metrics.declare({"a": 2, "b": jnp.ones((), jnp.bool_), "c": Sum(3)})
    assert declared["a"] == Mean(2.0)
    assert declared["b"].value.dtype == jnp.float32
    assert declared["c"] == Sum(3)


def test_microbatches_merge_by_weight():
    found = metrics.merge_microbatches(
        {
            "mean": Mean(jnp.asarray(VALUES), jnp.asarray(WEIGHTS)),
            "sum": Sum(jnp.asarray(VALUES)),
            "max": Max(jnp.asarray(VALUES)),
        }
    )
    expected = (VALUES * WEIGHTS).sum() / WEIGHTS.sum()
    np.testing.assert_allclose(found["mean"].value, expected, rtol=1e-6)
    assert float(found["mean"].weight) == WEIGHTS.sum()
    assert float(found["sum"].value) == VALUES.sum()
    assert float(found["max"].value) == 9


def test_a_microbatch_of_weight_zero_may_hold_nan():
    values = jnp.asarray([np.nan, 3.0])
    found = metrics.merge_microbatches({"m": Mean(values, jnp.asarray([0.0, 2.0]))})
    assert float(found["m"].value) == 3


def test_vectors_merge_entry_by_entry():
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    expected = np.average(rows, axis=0, weights=WEIGHTS)
    np.testing.assert_allclose(
        merged(Mean, rows, WEIGHTS), np.tile(expected, (8, 1)), rtol=1e-6
    )
    found = metrics.merge_microbatches(
        {"m": Mean(jnp.asarray(rows), jnp.asarray(WEIGHTS))}
    )
    np.testing.assert_allclose(found["m"].value, expected, rtol=1e-6)


def test_a_nested_tree_keeps_its_structure():
    def step_fn(state, batch):
        x = batch["x"].mean()
        return state, {"a": {"b": [x, Sum(x)]}, "c": (Max(x), PerReplica({"d": x}))}

    _, found = replicas(8).compile(step_fn)({"w": jnp.ones(())}, {"x": VALUES})
    assert jax.tree.structure(found) == jax.tree.structure(
        {"a": {"b": [0, 0]}, "c": (0, {"d": 0})}
    )
    np.testing.assert_array_equal(found["c"][1]["d"], VALUES)


def test_half_precision_metrics_keep_their_dtype():
    found = merged(lambda x: Mean(x.astype(jnp.bfloat16)), VALUES)
    assert found.dtype == jnp.bfloat16


def test_a_weight_per_example_is_refused():
    def step_fn(state, batch):
        return state, {"x": Mean(batch["x"].mean(), batch["x"])}

    with pytest.raises(ArgumentError, match="`weight` must be one real number"):
        replicas(8).compile(step_fn)(
            {"w": jnp.ones(())}, {"x": np.ones(16, np.float32)}
        )


def test_small_counts_do_not_grow_in_64_bit_mode():
    with jax.enable_x64(True):
        declared = metrics.declare(
            {"n": Sum(jnp.ones(4, jnp.int8)), "x": Mean(jnp.ones(4))}
        )
        found = metrics.merge_microbatches(declared)
    assert (found["n"].value.dtype, found["x"].value.dtype) == (jnp.int32, jnp.float64)


def test_a_mean_of_doubles_is_weighted_in_doubles():
    with jax.enable_x64(True):
        weights = jnp.asarray([1, 2**25 + 1], jnp.int32)
        declared = metrics.declare(Mean(jnp.asarray([0.0, 1.0]), weights))
        found = metrics.merge_microbatches(declared)
    assert float(found.value) == (2**25 + 1) / (2**25 + 2)


@pytest.mark.parametrize("reduction", ["fast", "ordered"])
def test_the_extremes_of_ordered_replicas_are_merged_too(reduction):
    def step_fn(state, batch):
        x = batch["x"].mean()
        return state, {"max": Max(x), "min": Min(x), "half": x.astype(jnp.float16)}

    rep = replicas(8, reduction=reduction)
    _, found = rep.compile(step_fn)({"w": jnp.ones(())}, {"x": VALUES})
    assert (found["max"], found["min"]) == (9, 1)
    np.testing.assert_allclose(found["half"], VALUES.mean(), rtol=1e-3)
