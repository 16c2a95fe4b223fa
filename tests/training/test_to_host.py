"""Small arrays come to the host as they are, wherever they lie."""

import jax
import numpy as np
import pytest

from replicator.base.mesh import replica_mesh, replicated, split_over_replicas
from replicator.training.to_host import to_host


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("lies", [replicated, split_over_replicas])
def test_an_array_is_the_same_on_the_host(count, lies):
    array = np.arange(16.0, dtype=np.float32)
    placed = jax.device_put(array, lies(replica_mesh(count)))
    found = to_host({"a": placed, "b": [array]})
    np.testing.assert_array_equal(found["a"], array)
    assert found["b"][0] is array


def test_a_tree_without_arrays_is_returned():
    assert to_host({"nothing": None}) == {"nothing": None}
