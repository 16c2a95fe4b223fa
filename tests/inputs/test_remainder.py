import logging
import re

import numpy as np
import pytest

from replicator.errors import BatchError
from tests.inputs.helpers import batches, read, values


def test_an_uneven_last_batch_is_filled_up_and_masked(layout):
    full, last = read(batches(8, 3), layout, epochs=1)

    np.testing.assert_array_equal(full.value["mask"], np.ones(8, np.float32))
    np.testing.assert_array_equal(last.value["mask"], [1, 1, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(last.value["x"], [8, 9, 10, 8, 9, 10, 8, 9])


def test_a_padded_batch_says_so(layout):
    full, last = read(batches(8, 3), layout, epochs=1)

    assert (full.examples, full.padded, full.index) == (8, False, 0)
    assert (last.examples, last.padded, last.index) == (3, True, 1)


def test_a_mean_by_mask_counts_every_example_once(layout):
    items = values(read(batches(8, 8, 5), layout, epochs=1))
    total = sum((item["x"] * item["mask"]).sum() for item in items)

    assert sum(item["mask"].sum() for item in items) == 21
    assert total == np.arange(21).sum()


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_the_users_own_mask_is_kept_and_multiplied(dtype, layout):
    own = np.array([[1, 0], [1, 1], [0, 1]] * 3, dtype)[:8]
    data = [{"x": np.zeros((n, 2), np.float32), "mask": own[:n]} for n in (8, 3)]
    full, last = values(read(data, layout, epochs=1))

    np.testing.assert_array_equal(full["mask"], own)
    np.testing.assert_array_equal(last["mask"][:3], own[:3])
    assert not last["mask"][3:].any()
    assert last["mask"].dtype == dtype


def test_the_batch_after_an_uneven_one_is_full_again(layout):
    items = read(batches(8, 3), layout, steps=4)

    assert [item.examples for item in items] == [8, 3, 8, 3]


def test_dropping_says_how_much(layout, caplog):
    items = read(batches(8, 3), layout, remainder="drop", steps=2)

    assert [item.examples for item in items] == [8, 8]
    np.testing.assert_array_equal(items[0].value["mask"], np.ones(8, np.float32))
    assert (
        "replicator.inputs.remainder",
        logging.WARNING,
        "Dropped the last examples of an epoch: 3 of 8 (batch 1). "
        "Pass `remainder='mask'` to count them.",
    ) in caplog.record_tuples


UNEVEN = {
    "refused": (
        batches(8, 3),
        "refuse",
        "`dataset` must yield full batches under `remainder='refuse'`, got 3 of 8 "
        "(batch 1). Pass `remainder='mask'` or `remainder='drop'`.",
    ),
    "no dict": (
        [(batch["x"],) for batch in batches(8, 3)],
        "mask",
        "`dataset` must yield dicts for an uneven batch to be masked, got 3 of 8 "
        "(batch 1) in a `tuple`. Yield dicts, or pass `remainder='drop'`.",
    ),
}


@pytest.mark.parametrize(
    ("dataset", "remainder", "message"), UNEVEN.values(), ids=UNEVEN
)
def test_an_uneven_batch_that_cannot_be_masked_is_refused(
    dataset, remainder, message, layout
):
    with pytest.raises(BatchError, match=f"^{re.escape(message)}$"):
        read(dataset, layout, epochs=1, remainder=remainder)


def test_full_batches_need_no_dict(layout):
    items = read([(batch["x"],) for batch in batches(8, 8)], layout, epochs=1)

    np.testing.assert_array_equal(items[1].value[0], np.arange(8, 16))
