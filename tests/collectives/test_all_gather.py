import numpy as np
import pytest

from replicator.collectives import all_gather
from replicator.errors import ArgumentError
from tests.helpers import on_replicas

X = np.arange(16).reshape(8, 2)
PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_groups_gather_among_themselves():
    stacked, tiled = on_replicas(
        lambda x: (
            all_gather(x, groups=PAIRS),
            all_gather(x, groups=PAIRS, tiled=True),
        ),
        X.astype(np.int32),
    )
    for group in PAIRS:
        for replica in group:
            np.testing.assert_array_equal(stacked[replica], X[group])
            np.testing.assert_array_equal(tiled[replica], X[group].ravel())


def test_booleans_are_gathered():
    flags = np.arange(8) % 3 == 0
    assert on_replicas(all_gather, flags)[5].tolist() == flags.tolist()


def test_scalars_are_stacked_but_not_concatenated():
    assert on_replicas(all_gather, np.arange(8.0, dtype=np.float32)).shape == (8, 8)
    with pytest.raises(ArgumentError, match=r"`tree` must .* a scalar \(leaf `loss`\)"):
        all_gather({"loss": 1.0}, tiled=True)


def test_unequal_groups_are_refused():
    groups = [[0, 1, 2], [3, 4, 5, 6, 7]]
    with pytest.raises(ArgumentError) as caught:
        on_replicas(lambda x: all_gather(x, groups=groups), X.astype(np.int32))
    assert str(caught.value) == (
        "`groups` must be equally large here, got [[0, 1, 2], [3, 4, 5, 6, 7]]. Only "
        "`all_reduce` with `reduction='fast'` and an `op` other than 'product' takes "
        "unequal ones."
    )
