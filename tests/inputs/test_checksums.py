"""A few bytes of a batch tell it from others."""

import jax.numpy as jnp
import numpy as np
import pytest

from replicator.inputs.checksums import checksum


def images(seed):
    """Images with a black margin, of which a corner tells nothing."""
    numbers = np.random.default_rng(seed)
    batch = np.zeros((256, 28, 28, 1), np.float32)
    batch[:, 4:-4, 4:-4] = numbers.random((256, 20, 20, 1), np.float32)
    return batch


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch[np.random.default_rng(1).permutation(len(batch))],
        lambda batch: batch.transpose(0, 2, 1, 3),
        lambda batch: batch[::-1],
    ],
    ids=["shuffled", "transposed", "backwards"],
)
def test_a_large_batch_is_told_by_a_sample_of_it(change):
    batch = images(0)
    assert checksum({"x": batch}) == checksum({"x": images(0)})
    assert checksum({"x": batch}) != checksum({"x": change(batch)})
    same = np.asfortranarray(batch)
    assert checksum({"x": same}) == checksum({"x": same.copy(order="K")})


def test_each_bit_of_a_small_batch_counts():
    batch = np.zeros(8192, np.int64)
    other = batch.copy()
    other[-1] = 1
    assert checksum([batch]) != checksum([other])


@pytest.mark.parametrize("size", [65_537, 66_000, 70_001, 1_000_003])
def test_arrays_of_every_size_and_dtype_can_be_sampled(size):
    for dtype in (np.uint8, np.float16, jnp.bfloat16, np.complex64):
        assert checksum(np.zeros(size, dtype)) == checksum(np.zeros(size, dtype))


def test_what_lies_on_a_device_is_not_read_back():
    on_host = checksum({"x": np.zeros(3)})
    assert checksum({"x": np.zeros(3), "y": jnp.ones(3)}) == on_host
    assert checksum({"y": jnp.ones(3)}) is None
