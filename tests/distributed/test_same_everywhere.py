"""What processes compare of a state (that they do: tests/multiprocess)."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicator.distributed.same_everywhere import _checksums

LEAVES = {
    "float32": np.asarray([1.0, 2.0, 3.0], np.float32),
    "bfloat16": np.asarray([1.0, 2.0, 3.0], ml_dtypes.bfloat16),
    "float8": np.asarray([1.0, 2.0, 3.0], ml_dtypes.float8_e4m3fn),
    "complex64": np.asarray([1 + 2j, 3, 4], np.complex64),
    "int8": np.asarray([-1, 2, 3], np.int8),
    "bool": np.asarray([True, False, True]),
}


def checksum(leaf):
    return int(_checksums([jnp.asarray(leaf)])[0])


@pytest.mark.parametrize("name", LEAVES)
def test_another_value_or_another_order_is_noticed(name):
    leaf = LEAVES[name]
    changed, swapped = leaf.copy(), leaf[[1, 0, 2]]
    changed[2] = leaf[1]
    assert len({checksum(leaf), checksum(changed), checksum(swapped)}) == 3


def test_minus_zero_is_another_value():
    assert checksum(np.float32(0.0)) != checksum(np.float32(-0.0))


def test_a_random_key_is_compared_by_its_data():
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    first, same, other = [int(_checksums([key])[0]) for key in keys]
    assert first == same != other


def test_ones_are_not_zeros_however_many():
    ones, zeros = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
    assert checksum(ones) != checksum(zeros)
