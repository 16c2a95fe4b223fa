import numpy as np
import pytest

from replicator.collectives import permute, ring_pairs
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

X = np.arange(1, 9, dtype=np.int32)


def test_who_receives_nothing_holds_zeros():
    found = on_replicas(lambda x: permute(x, [(7, 0), (0, 3)]), X)
    assert found.tolist() == [8, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("shift", [-1, 1, 3])
def test_a_ring_shifts(shift):
    found = on_replicas(lambda x: permute(x, ring_pairs(shift)), X)
    assert found.tolist() == np.roll(X, shift).tolist()


def test_one_replica_sends_to_itself_or_to_nobody():
    assert permute(5, ring_pairs()) == 5
    assert permute(5, []) == 0


@pytest.mark.parametrize("pairs", [[(0, 8)], [(0, 1), (0, 2)], [(0, 1), (2, 1)]])
def test_wrong_pairs_are_refused(pairs):
    with pytest.raises(ArgumentError) as caught:
        on_replicas(lambda x: permute(x, pairs), X)
    assert str(caught.value) == (
        "`pairs` must name replicas between 0 and 7, each at most once as source and "
        f"once as destination, got {pairs}. Use `ring_pairs()` for a valid list."
    )
