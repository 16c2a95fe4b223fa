import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.collectives import broadcast
from replicator.errors import ArgumentError
from tests.helpers import on_replicas, primitive_counts

DTYPES = [
    np.bool_,
    np.int8,
    np.uint32,
    np.int32,
    np.float16,
    jnp.bfloat16,
    np.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_unchanged(dtype):
    x = np.arange(8).astype(dtype)
    found = on_replicas(lambda x: broadcast(x, source=5), x)
    assert found.dtype == x.dtype
    assert (np.asarray(found) == x[5]).all()


def test_what_others_hold_does_not_spread():
    x = np.full(8, np.nan, np.float32)
    x[2] = 7
    assert on_replicas(lambda x: broadcast(x, source=2), x).tolist() == [7] * 8


def test_nan_in_others_does_not_reach_the_gradient():
    x = np.full(8, np.nan, np.float32)
    x[2] = 7
    gradient = on_replicas(jax.grad(lambda x: broadcast(x, source=2) ** 2), x)
    assert gradient.tolist() == [0, 0, 8 * 14, 0, 0, 0, 0, 0]


def test_extreme_values_of_the_source_arrive():
    x = np.zeros((8, 3), np.float32)
    x[0] = [np.inf, np.nan, np.finfo(np.float32).max]
    np.testing.assert_array_equal(on_replicas(broadcast, x)[7], x[0])


def test_booleans_travel_as_bytes():
    counts = primitive_counts(broadcast, np.arange(8) == 1)
    assert counts["psum"] == 1
    text = str(jax.make_jaxpr(lambda x: on_replicas(broadcast, x))(np.arange(8) == 1))
    assert "u8[] = psum" in text


@pytest.mark.parametrize("source", [-1, 8])
def test_a_source_that_does_not_exist_is_refused(source):
    with pytest.raises(ArgumentError) as caught:
        on_replicas(lambda x: broadcast(x, source=source), np.ones(8, np.float32))
    assert str(caught.value) == (
        f"`source` must be a replica between 0 and 7, got {source}. Use 0, which "
        "always exists."
    )


def test_random_keys_are_refused_by_name(key):
    with pytest.raises(ArgumentError, match=r"numbers or booleans, .*\(leaf `key`\)"):
        broadcast({"key": key})
