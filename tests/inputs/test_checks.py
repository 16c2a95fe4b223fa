"""Every bad batch, with the whole message that a user reads."""

import re

import jax
import numpy as np
import pytest

from replicator.errors import BatchError, NonFiniteError
from tests.inputs.helpers import batches, read


def _x(size=8, *, dtype=np.float32, trailing=()):
    return np.zeros((size, *trailing), dtype)


def _with_nan():
    x = _x(trailing=(3,))
    x[5, 1] = np.nan
    return {"x": x}


BAD = {
    "does not divide": (
        [{"x": _x(100)}],
        "`global_batch` must divide evenly over 8 replicas, got 100 (batch 0). "
        "Use 96 or 104.",
    ),
    "too small to divide": (
        [{"x": _x(3)}],
        "`global_batch` must divide evenly over 8 replicas, got 3 (batch 0). Use 8.",
    ),
    "another shape": (
        [{"x": _x(trailing=(4, 4))}, {"x": _x(trailing=(4, 5))}],
        "`dataset` must yield `x` as float32[*,4,4] like its first batch, got "
        "float32[*,4,5] (batch 1). Cast, crop or pad it in the input.",
    ),
    "another dtype": (
        [{"x": _x()}, {"x": _x(dtype=np.int32)}],
        "`dataset` must yield `x` as float32[*] like its first batch, got "
        "int32[*] (batch 1). Cast, crop or pad it in the input.",
    ),
    "other keys": (
        [{"x": _x(), "label": _x()}, {"x": _x(), "labels": _x()}],
        "`dataset` must yield the leaves of its first batch every time, got no "
        "`label`, a new `labels` (batch 1). Make all batches alike.",
    ),
    "other containers": (
        [(_x(), _x()), [_x(), _x()]],
        "`dataset` must yield the containers of its first batch every time, got "
        "PyTreeDef([*, *]) instead of PyTreeDef((*, *)) (batch 1). "
        "Make all batches alike.",
    ),
    "more examples": (
        [{"x": _x()}, {"x": _x(16)}],
        "`dataset` must yield at most the 8 examples of its first batch every time, "
        "got 16 (batch 1). "
        "Let only the last batch of an epoch have another size, a smaller one.",
    ),
    "a short batch inside": (
        batches(8, 5, 8),
        "`dataset` must yield 8 examples in every batch but the last of an epoch, got "
        "5 and another batch after it (batch 1). "
        "Make the batches of the input equal.",
    ),
    "no examples": (
        [{"x": _x(0)}],
        "`dataset` must yield at least one example per batch, got 0 (batch 0). "
        "Leave empty batches out.",
    ),
    "no leaves": (
        [{}],
        "`dataset` must yield batches that hold arrays, got {} (batch 0). "
        "Yield a dict of arrays.",
    ),
    "no batches": (
        [],
        "`dataset` must yield at least one batch, got none. "
        "Look at its source, its filters and its batch size.",
    ),
    "leading sizes differ": (
        [{"image": _x(8), "label": _x(7)}],
        "`dataset` must yield leaves of one leading size, got `image` with 8 and "
        "`label` with 7 (batch 0). Give each leaf one row per example.",
    ),
    "objects": (
        [{"meta": {"name": np.array([None] * 8)}}],
        "`dataset` must yield arrays of numbers, got object[*] for `meta/name` "
        "(batch 0). Encode it as a numeric array, or leave it out.",
    ),
    "strings": (
        [{"name": np.array(["a"] * 8)}],
        "`dataset` must yield arrays of numbers, got <U1[*] for `name` "
        "(batch 0). Encode it as a numeric array, or leave it out.",
    ),
    "a Python number": (
        [{"x": _x(), "rate": 0.1}],
        "`dataset` must yield leaves with a leading batch axis, got the scalar `rate` "
        "(batch 0). Repeat it for each example, or leave it out.",
    ),
    "lists of two lengths": (
        [{"x": _x(), "tokens": [[1, 2, 3], [4, 5]]}],
        "`dataset` must hold lists of equal lengths, got 2 and 3 numbers for `tokens` "
        "(batch 0). Pad them, or cut them, to one length.",
    ),
    "a scalar": (
        [{"x": _x(), "scale": np.float32(2)}],
        "`dataset` must yield leaves with a leading batch axis, got the scalar `scale` "
        "(batch 0). Repeat it for each example, or leave it out.",
    ),
    "ids beyond 32 bits": (
        [{"id": np.full(8, 3_000_000_000)}],
        "`dataset` must yield `id` within the range of int32, got values from "
        "3000000000 to 3000000000 (batch 0). "
        "Set `jax_enable_x64`, or use smaller ids.",
    ),
}


@pytest.mark.parametrize(("dataset", "message"), BAD.values(), ids=BAD)
def test_a_bad_batch_is_refused_in_full_words(dataset, message, layout):
    with pytest.raises(BatchError, match=f"^{re.escape(message)}$"):
        read(dataset, layout, epochs=1)


def test_nan_is_refused_by_leaf_and_example(layout):
    message = (
        "`dataset` must yield no NaN, got one in `x`, example 5 (batch 1). "
        "Clean that example, or pass `inputs=InputOptions(allow_nan=True)`."
    )

    with pytest.raises(NonFiniteError, match=re.escape(message)):
        read([{"x": _x(trailing=(3,))}, _with_nan()], layout, epochs=1)


def test_nan_can_be_allowed(layout):
    (item,) = read([_with_nan()], layout, epochs=1, allow_nan=True)

    assert np.isnan(np.asarray(item.value["x"])).sum() == 1


def test_infinity_is_no_error(layout):
    (item,) = read([{"x": np.full(8, -np.inf, np.float32)}], layout, epochs=1)

    assert np.isneginf(np.asarray(item.value["x"])).all()


def test_accumulation_needs_equal_microbatches(layout):
    message = (
        "`global_batch` must divide evenly over 8 replicas and 4 microbatches, got 40 "
        "(batch 0). Use 32 or 64."
    )

    with pytest.raises(BatchError, match=re.escape(message)):
        read([{"x": _x(40)}], layout, accumulate=4)


@pytest.mark.parametrize(
    ("given", "placed"), [("float64", "float32"), ("int64", "int32"), ("bool", "bool")]
)
def test_a_batch_is_cast_as_jax_would_cast_it(given, placed, layout):
    (item,) = read([{"x": np.ones(8, given)}], layout, epochs=1)

    assert item.value["x"].dtype == placed


def test_double_precision_of_the_callers_thread_holds_in_the_input(layout):
    with jax.enable_x64(True):
        (item,) = read([{"x": np.ones(8)}], layout, epochs=1)

    assert item.value["x"].dtype == "float64"


def test_float64_and_float32_batches_are_alike_in_32_bits(layout):
    items = read([{"x": _x()}, {"x": _x(dtype=np.float64)}], layout, epochs=1)

    assert [item.value["x"].dtype for item in items] == ["float32", "float32"]
