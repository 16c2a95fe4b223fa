"""`assert_collectives` holds a step to what its test expects."""

import jax.numpy as jnp
import numpy as np
import pytest

from replicator import Replicator, strategies
from replicator.errors import ArgumentError, CollectivesError
from replicator.testing import assert_collectives

batch = {"x": np.ones((256, 32), np.float32)}


def init_fn(key):
    return {"params": {"w": jnp.ones((32, 16))}}


def step_fn(state, rows):
    return state, {"y": (rows["x"] @ state["params"]["w"]).mean()}  # the product


@pytest.fixture(scope="module")
def found():
    rep = Replicator(strategy=strategies.fsdp(whole_below_bytes=0))
    return rep.inspect(step_fn, init_fn, batch)


@pytest.mark.parametrize(
    "expected",
    [
        {"all-gather": 1, "all-reduce": 1},
        {"all-gather shard": 1, "all-reduce": range(3), "all-to-all": 0},
        {"all-gather": {1, 2}, "all-reduce shard": 1},
    ],
)
def test_a_step_with_what_is_expected_passes(found, expected):
    assert_collectives(found, expected)


def test_what_differs_is_told_with_the_line_that_it_comes_from(found):
    with open(__file__) as source:
        [line] = [n for n, text in enumerate(source, 1) if "  # the product\n" in text]
    with pytest.raises(CollectivesError) as failure:
        assert_collectives(found, {"all-gather": 2, "all-reduce": 1})
    first, gather, remedy = str(failure.value).splitlines()

    assert first == (
        "`step` must have the collectives expected, got all-gather 1 times instead of "
        "2:"
    )
    assert gather.startswith("  1 all-gather shard of f32[32,16], 1,792 bytes: ")
    assert f"test_collectives.py:{line} in step_fn" in gather or "params/w" in gather
    assert remedy == "Mend the lines that send them, or expect them."


def test_what_is_not_named_must_not_be(found):
    with pytest.raises(CollectivesError, match="all-gather shard 1 times instead of 0"):
        assert_collectives(found, {"all-reduce": 1})


def test_the_same_kind_along_other_axes_does_not_count(found):
    with pytest.raises(CollectivesError, match="all-gather model 0 times instead of 1"):
        assert_collectives(found, {"all-gather model": 1, "all-reduce": 1})


def test_a_range_is_told_by_its_ends(found):
    with pytest.raises(CollectivesError, match="all-gather 1 times instead of 2 to 4"):
        assert_collectives(found, {"all-gather": range(2, 5), "all-reduce": 1})


def test_a_key_that_is_no_kind_is_refused(found):
    with pytest.raises(ArgumentError, match="must name kinds of collectives, got 'psu"):
        assert_collectives(found, {"psum": 1})


@pytest.mark.parametrize("axes", ["shrad", "shard,replica", "shard,shard", ""])
def test_a_key_whose_axes_could_match_nothing_is_refused(found, axes):
    with pytest.raises(ArgumentError, match="must name axes of the mesh, in its order"):
        assert_collectives(found, {f"all-to-all {axes}": 0})
