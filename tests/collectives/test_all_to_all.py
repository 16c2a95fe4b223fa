import numpy as np
import pytest

from replicator.collectives import all_to_all
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

X = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)


def test_twice_gives_back_the_input():
    np.testing.assert_array_equal(
        on_replicas(lambda x: all_to_all(all_to_all(x)), X), X
    )


def test_groups_exchange_among_themselves():
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    found = on_replicas(lambda x: all_to_all(x, groups=groups), X)
    for group in groups:
        sent = X[group].reshape(4, 4, 4)  # sender, receiver, slice
        np.testing.assert_array_equal(
            found[np.array(group)], sent.swapaxes(0, 1).reshape(4, 16)
        )


def test_a_scalar_is_refused_by_name():
    with pytest.raises(
        ArgumentError, match=r"axis 0 .* got float32\[\] \(leaf `loss`\)"
    ):
        all_to_all({"loss": 1.0})
