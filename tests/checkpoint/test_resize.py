import ml_dtypes
import numpy as np
import pytest

from replicator.checkpoint.manifest import LeafRecord
from replicator.checkpoint.resize import resize
from replicator.errors import CheckpointMismatchError

FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def leaf_of(array, **fields):
    dtype = fields.pop("dtype", str(array.dtype))
    return LeafRecord(parts=("sums",), dtype=dtype, shape=array.shape, **fields)


def resized(array, num_replicas, word):
    return resize(array, leaf_of(array), num_replicas=num_replicas, on_resize=word)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 7, 8])
def test_shares_of_floats_add_up_to_the_old_sum(dtype, num_replicas):
    old = np.random.default_rng(0).normal(size=(4, 50)).astype(dtype)
    new = resized(old, num_replicas, "sum")
    total = old.astype(np.float64).sum(axis=0)
    # Only the last share is rounded against the total: half a unit in its last place.
    error = np.abs(new.astype(np.float64).sum(axis=0) - total)
    last_place = np.abs(new[-1].astype(np.float64)) * ml_dtypes.finfo(dtype).eps
    assert new.dtype == dtype
    assert new.shape == (num_replicas, 50)
    assert (error <= last_place + 8 * np.finfo(np.float64).eps * np.abs(total)).all()


def test_shares_of_a_sum_that_divides_are_exact_and_equal():
    old = np.asarray([[3.0, 1.5], [5.0, 0.5]], np.float32)
    np.testing.assert_array_equal(resized(old, 4, "sum"), np.full((4, 2), [2.0, 0.5]))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_shares_of_integers_add_up_and_differ_by_one_at_most(dtype):
    old = np.asarray([[7, 0], [4, 1]], dtype)
    new = resized(old, 3, "sum")
    np.testing.assert_array_equal(new.sum(axis=0), [11, 1])
    assert np.ptp(new, axis=0).max() <= 1
    assert new.dtype == dtype


def test_a_sum_of_large_integers_does_not_overflow():
    largest = np.iinfo(np.int64).max
    old = np.full((2, 1), largest)
    np.testing.assert_array_equal(resized(old, 2, "sum"), old)
    assert sum(resized(old, 4, "sum")[:, 0].tolist()) == 2 * largest


def test_the_mean_goes_to_every_replica():
    old = np.asarray([[1.0], [2.0], [6.0]], np.float32)
    np.testing.assert_array_equal(resized(old, 2, "mean"), [[3.0], [3.0]])


def test_the_first_goes_to_every_replica_with_its_bits():
    old = np.asarray([[np.nan, -0.0], [1.0, 2.0]], np.float32)
    assert resized(old, 3, "first").tobytes() == 3 * old[:1].tobytes()


def test_refuse_names_the_leaf_and_the_remedy():
    with pytest.raises(
        CheckpointMismatchError, match="`sums` must have the 2 replicas"
    ):
        resized(np.zeros((2, 1)), 4, "refuse")


@pytest.mark.parametrize("word", ["sum", "mean"])
def test_keys_and_truth_values_have_no_sum(word):
    keys = leaf_of(
        np.zeros((2, 2), np.uint32), dtype="key<fry>", key_impl="threefry2x32"
    )
    with pytest.raises(CheckpointMismatchError, match="must hold numbers"):
        resize(np.zeros((2, 2), np.uint32), keys, num_replicas=4, on_resize=word)
    with pytest.raises(CheckpointMismatchError, match="must hold numbers"):
        resized(np.zeros((2, 1), bool), 4, word)
