import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.step.norms import OURS, make_norms, require_equal


def results(**changed):
    """What a step returns: the norm, and arrays beside it."""
    norm = make_norms(3)[OURS]
    assert isinstance(norm, nnx.Module)
    return norm, {"y": np.arange(6.0), "of_x": np.ones(6)} | changed


def test_norms_that_differ_by_rounding_may_be_timed():
    require_equal(results(y=np.arange(6.0) + 1e-5), results(), OURS)


def test_a_norm_that_computes_something_else_is_not_timed():
    with pytest.raises(ValueError, match="`1/y` of replicator must be that of flax"):
        require_equal(results(y=np.arange(6.0) + 1e-2), results(), OURS)


def test_an_answer_that_is_no_number_is_not_timed():
    with pytest.raises(ValueError, match="`1/of_x` of replicator"):
        require_equal(results(of_x=np.full(6, np.nan)), results(), OURS)


def test_all_norms_begin_alike():
    first, *others = map(jax.tree.leaves, make_norms(3).values())
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, first)
