"""Batches that are left out, and which step got which."""

import dataclasses

import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.inputs.skipped_batches import SkippedBatches, require_rereadable


@dataclasses.dataclass(frozen=True)
class Batch:
    index: int
    steps: int = 1


class Input:
    """Batches of a list."""

    stall_s = 1.5

    def __init__(self, *batches):
        self._batches = iter(batches)
        self.closed = False

    def __next__(self):
        return next(self._batches)

    def close(self):
        self.closed = True


def noted(*indices, steps=1, start_step=0, **options):
    batches = [Batch(index, steps) for index in indices]
    return SkippedBatches(Input(*batches), start_step=start_step, **options)


def test_a_batch_is_left_out_by_its_index():
    batches = noted(3, 4, 5, 6, left_out={4, 5, 99})
    assert [batch.index for batch in batches] == [3, 6]


def test_the_last_batches_may_be_left_out():
    assert [batch.index for batch in noted(3, 4, left_out={4})] == [3]


def test_it_tells_which_call_made_a_step():
    batches = noted(6, 8, 10, steps=2, start_step=4, left_out={8})
    assert len(list(batches)) == 2
    calls = [batches.call_of(step) for step in range(4, 10)]
    assert calls == [None, 6, 6, 10, 10, None]


def test_the_newest_batches_are_held_and_no_others():
    batches = noted(0, 1, 2, held=2)
    list(batches)
    held = [batches.batch_of(step) for step in (1, 2, 3)]
    assert held == [None, Batch(1), Batch(2)]


def test_it_closes_and_tells_the_stall_of_the_input():
    source = Input()
    batches = SkippedBatches(source, start_step=0)
    batches.close()
    assert source.closed
    assert batches.stall_s == 1.5


class Columns:
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    "dataset",
    [[], (), Columns(), lambda context: iter([])],
    ids=["list", "tuple", "columns", "input function"],
)
def test_what_can_be_read_again_is_accepted(dataset):
    require_rereadable(dataset, why="on_nonfinite='rollback'")


@pytest.mark.parametrize("dataset", [iter([]), (_ for _ in ()), lambda: np.ones(8)])
def test_what_is_gone_once_it_was_read_is_refused(dataset):
    with pytest.raises(ArgumentError, match="with `on_nonfinite='rollback'`, got `"):
        require_rereadable(dataset, why="on_nonfinite='rollback'")
