"""A list of Python numbers is an array, as Hugging Face datasets give them."""

import numpy as np
import pytest

from replicator.base.number_lists import lists_as_arrays
from replicator.errors import BatchError
from replicator.inputs.checks import numeric_arrays
from tests.steps import regression_batch, replicas


def converted(batch):
    return lists_as_arrays(batch, name="batch")


def test_lists_become_arrays_of_their_numbers():
    found = converted({"ids": [[1, 2], [3, 4]], "y": [0.5, 1], "right": [True, False]})
    assert found["ids"].shape == (2, 2)
    assert [found[name].dtype.kind for name in ("ids", "y", "right")] == ["i", "f", "b"]


def test_a_list_that_holds_an_array_stays_a_tree():
    leaf = np.ones(2)
    found = converted({"x": [leaf, [1.0, 2.0]]})
    assert found["x"][0] is leaf
    assert found["x"][1].shape == (2,)


def test_a_tuple_stays_a_tree():
    first, second = converted(([1, 2], [3, 4]))
    assert (first.shape, second.shape) == ((2,), (2,))


def test_text_is_left_for_its_own_error():
    with pytest.raises(BatchError, match="got `str`"):
        numeric_arrays({"x": ["a", "b"]}, where="batch 0")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[1, 2, 3], [4, 5]], "2 and 3 numbers"),
        ([[[1], [2]], [[3], [4, 5]]], "1 and 2 numbers"),
        ([1, [2]], "numbers beside lists"),
        ([1.0, None], "None in the place of a number"),
        ([[1, None], [2, 3]], "None in the place of a number"),
    ],
)
def test_uneven_lists_are_refused_by_leaf(rows, found):
    with pytest.raises(BatchError, match=f"got {found} for `tokens`"):
        converted({"tokens": rows})


def test_a_batch_of_lists_moves_a_step_as_its_arrays_do():
    batch = regression_batch()
    lists = {name: leaf.tolist() for name, leaf in batch.items()}
    rep = replicas(2)

    def step_fn(state, batch):
        return state, {"x": (batch["x"].sum(-1) * batch["y"]).mean()}

    def metrics(given, debug=False):
        step = rep.compile(step_fn, debug=debug)
        return float(step(rep.init(lambda key: {"n": 0}), given)[1]["x"])

    assert metrics(lists) == metrics(batch)
    assert metrics(lists, debug=True) == pytest.approx(metrics(batch))
