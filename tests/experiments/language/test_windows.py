import numpy as np
import pytest

from experiments.language.windows import held_out_batches, train_input_fn
from replicator.errors import ArgumentError
from replicator.inputs import InputContext

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)
ALONE = InputContext(pipeline_index=0, num_pipelines=1, num_replicas=1)


def test_an_epoch_of_windows_holds_the_text_once():
    batches = iter(train_input_fn(ALONE, TEXT, global_batch=3, length=37, seed=0))
    rows = np.concatenate([next(batches)["tokens"] for _ in range(9)])

    assert rows.shape == (27, 38)
    assert sorted(rows[:, 0]) == sorted(TEXT[:999:37].astype(int))
    assert all((np.diff(row) % 256 == 1).all() for row in rows)


@pytest.mark.parametrize("size", [18, 19, 33, 34, 100, 1000])
def test_each_held_out_byte_but_the_first_counts_once(size):
    text, found = TEXT[:size], []
    for batch in held_out_batches(text, batch=4, length=17):
        counted = batch["mask"] > 0
        found.append(batch["tokens"][:, 1:][counted])
        # What counts has half a window before it, where there is that much.
        assert not counted[1:, :8].any() or size < 34

    np.testing.assert_array_equal(np.concatenate(found), text[1:])


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ArgumentError, match="below the 5 tokens of the text, got 5"):
        next(held_out_batches(TEXT[:5], batch=1, length=5))


@pytest.mark.parametrize("size", [75, 76, 100, 111])
def test_each_token_of_an_epoch_but_the_first_counts_once(size):
    options = {"global_batch": 3, "length": 37, "seed": 0}
    batch = next(iter(train_input_fn(ALONE, TEXT[:size], **options)))
    windows = -(-(size - 1) // 37)
    found = batch["tokens"][:windows, 1:][batch["mask"][:windows] > 0]
    assert sorted(found) == list(range(1, size))
