import collections
import dataclasses
import enum

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from replicator.errors import BatchError
from replicator.rpc.batching.batches import fit_of, merge, split


class Point(collections.namedtuple("Point", "x y")):
    """A namedtuple."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    action: int
    seen: np.ndarray

    def __post_init__(self):
        assert np.ndim(self.action) == 0, "one of each call"


class Colour(enum.IntEnum):
    RED = 1


RECORD = np.dtype([("a", np.int8), ("b", ">f4")])

# What one call passes, and the dtype and shape that three such calls make.
STACKED = {
    "array": (np.ones((2, 3), np.float32), (3, 2, 3)),
    "zero-dim array": (np.array(1.5), (3,)),
    "empty array": (np.ones((0, 4)), (3, 0, 4)),
    "bfloat16": (np.ones(2, ml_dtypes.bfloat16), (3, 2)),
    "structured": (np.zeros(2, RECORD), (3, 2)),
    "byte order": (np.ones(2, ">i4"), (3, 2)),
    "not contiguous": (np.ones((4, 6))[::2, ::3].T, (3, 2, 2)),
    "numpy scalar": (np.float16(2), (3,)),
    "int": (7, (3,)),
    "float": (0.5, (3,)),
    "bool": (True, (3,)),
    "jax array": (jnp.ones((2,), jnp.bfloat16), (3, 2)),
}
LISTED = {
    "str": "text",
    "bytes": b"bytes",
    "None": None,
    "list": [1, 2],
    "set": {1},
    "complex": 1j,
    "enum": Colour.RED,
    "int of 100 bits": 1 << 99,
    "random key": jax.random.key(0),
    "class": Move,
}
CONTAINERS = {
    "tuple": (np.int64(1), (np.float64(2), "a"), ()),
    "namedtuple": Point(np.int64(1), np.ones(2)),
    "dict": {"b": np.int64(1), "a": {"c": "x"}},
    "dataclass": Move(np.int64(1), np.ones(2)),
}
DIFFERENT = {
    "shape": (np.ones(2), np.ones(3)),
    "rank": (np.ones(1), np.ones(())),
    "dtype": (np.ones(2, np.float32), np.ones(2, np.float64)),
    "byte order": (np.ones(2, "<i4"), np.ones(2, ">i4")),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "int and array": (1, np.array(1)),
    "small and large int": (1, 1 << 70),
    "str and bytes": ("a", b"a"),
    "str and None": ("a", None),
    "keys": ({"a": 1}, {"b": 1}),
    "length": ((1, 2), (1, 2, 3)),
    "tuple and namedtuple": ((1, 2), Point(1, 2)),
    "inside": ({"a": (1, np.ones(2))}, {"a": (1, np.ones(3))}),
}


@pytest.mark.parametrize(("value", "shape"), STACKED.values(), ids=STACKED)
def test_arrays_and_numbers_get_a_new_first_axis(value, shape):
    merged = merge([value] * 3, size=3)
    assert isinstance(merged, np.ndarray)
    assert merged.shape == shape
    assert merged.dtype == np.asarray(value).dtype
    assert all(np.array_equal(row, np.asarray(value)) for row in merged)


@pytest.mark.parametrize("value", LISTED.values(), ids=LISTED)
def test_anything_else_becomes_a_list(value):
    assert merge([value, value], size=2) == [value, value]


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_are_merged_part_by_part_and_split_again(value):
    merged = merge([value] * 3, size=3)
    assert type(merged) is type(value)
    for row in split(merged, size=3, name="f"):
        assert fit_of(row) == fit_of(value)
        assert repr(row) == repr(value)


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ_do_not_fit(pair):
    assert fit_of(pair[0]) != fit_of(pair[1])
    assert fit_of(pair[0]) == fit_of(pair[0])


def test_order_of_keys_does_not_matter():
    first, second = {"a": 1, "b": 2.0}, {"b": 4.0, "a": 3}
    assert fit_of(first) == fit_of(second)
    assert merge([first, second], size=2)["a"].tolist() == [1, 3]


def test_numbers_of_numpy_fit_arrays_without_dimensions():
    assert fit_of(np.float32(1)) == fit_of(np.ones((), np.float32))


def test_padding_repeats_the_first():
    merged = merge([(np.array([1]), 1, "a"), (np.array([2]), 2, "b")], size=4)
    assert merged[0].tolist() == [[1], [2], [1], [1]]
    assert merged[1].tolist() == [1, 2, 1, 1]
    assert merged[2] == ["a", "b", "a", "a"]


def test_lists_in_a_result_are_split_by_element():
    rows = split({"a": [1, "x"], "b": (np.arange(2), None)}, size=2, name="f")
    assert rows == [{"a": 1, "b": (0, None)}, {"a": "x", "b": (1, None)}]


def test_jax_arrays_in_a_result_are_split_to_numpy():
    first, second = split(jnp.arange(4.0).reshape(2, 2), size=2, name="f")
    assert isinstance(second, np.ndarray)
    assert (first.tolist(), second.tolist()) == ([0, 1], [2, 3])


BAD_RESULTS = {
    "number": (3, "an? int at result\\."),
    "text": ("ab", "a str at result\\."),
    "too few rows": (np.ones((1, 2)), r"shape \(1, 2\) at result\."),
    "no axis": (np.float32(1), r"shape \(\) at result\."),
    "short list": ([1], r"a list of 1 at result\."),
    "inside": ({"a": (np.ones(2), 5)}, r"a int at result\['a'\]\[1\]\."),
}


@pytest.mark.parametrize(("result", "words"), BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_result_without_a_row_for_each_call_is_named(result, words):
    with pytest.raises(BatchError, match=r"`predict` must return one row .* 2 merged"):
        split(result, size=2, name="predict")
    with pytest.raises(BatchError, match=words):
        split(result, size=2, name="predict")
