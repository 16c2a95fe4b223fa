"""What a run ended with survives as JSON in its own dtypes; rows of a batch do not."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from replicator.monitoring.result_json import (
    MOST_NUMBERS,
    result_as_json,
    result_from_json,
)

METRICS = {
    "loss": np.float32(1.1),
    "worst": np.asarray(np.nan, np.float32),
    "most": np.asarray(np.inf, ml_dtypes.bfloat16),
    "count": np.asarray(2**31 - 1, np.int32),
    "half": np.asarray([0.5], np.float16),
    "table": np.asarray([[1, 2], [3, 4]], np.int32),
    "inner": {
        "each": np.asarray([1.5, -np.inf, 0.1], np.float32),
        "ok": np.bool_(True),
    },
}


def read_again(metrics):
    return result_from_json(json.loads(json.dumps(result_as_json(metrics))))


@pytest.mark.parametrize("metrics", [METRICS, np.float32(0.3), {}])
def test_numbers_survive_and_arrays_keep_their_dtypes(metrics):
    found = read_again(metrics)
    assert jax.tree.structure(found) == jax.tree.structure(metrics)
    for one, other in zip(
        jax.tree.leaves(found), jax.tree.leaves(metrics), strict=True
    ):
        np.testing.assert_array_equal(one, other)
        assert not np.ndim(other) or one.dtype == other.dtype


@pytest.mark.parametrize("left_out", [np.zeros(MOST_NUMBERS + 1), "word", 1j], ids=repr)
def test_what_is_large_or_no_number_is_left_out(left_out):
    metrics = {"kept": np.zeros((100, MOST_NUMBERS // 100)), "other": left_out}
    assert list(read_again(metrics)) == ["kept"]
