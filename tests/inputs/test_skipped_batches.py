"""Batches that are left out, and which step got which."""

import dataclasses

import pytest

from replicator.inputs.skipped_batches import SkippedBatches


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


def noted(*indices, steps=1, **options):
    batches = [Batch(index, steps) for index in indices]
    return SkippedBatches(Input(*batches), **options)


def test_a_batch_is_left_out_by_its_index():
    batches = noted(3, 4, 5, 6, left_out={4, 5, 99})
    assert [batch.index for batch in batches] == [3, 6]


def test_the_last_batches_may_be_left_out():
    assert [batch.index for batch in noted(3, 4, left_out={4})] == [3]


def test_it_tells_which_call_made_a_step():
    batches = noted(6, 8, 10, steps=2, left_out={8})
    for call, batch in enumerate(batches):
        batches.given(batch, step=4 + 2 * call)
    calls = [batches.call_of(step) for step in range(4, 10)]
    assert calls == [None, 6, 6, 10, 10, None]


def test_a_step_on_a_batch_from_elsewhere_is_of_no_call():
    batches = noted(0, 1, 2)
    for step, batch in enumerate([next(batches), None, next(batches)]):
        batches.given(batch, step=step)
    assert [batches.call_of(step) for step in (1, 2, 3)] == [0, None, 1]


@pytest.mark.parametrize(
    ("given", "in_order"),
    [("0 1 2", True), ("0 2", False), ("0 0", False), ("0 -", False)],
    ids=["all", "one skipped", "one twice", "one from elsewhere"],
)
def test_it_tells_whether_each_step_got_the_next_batch(given, in_order):
    batches, handed_out = noted(0, 1, 2), {}
    for step, name in enumerate(given.split()):
        if name == "-":
            batches.given(None, step=step)
            continue
        while int(name) not in handed_out:
            batch = next(batches)
            handed_out[batch.index] = batch
        batches.given(handed_out[int(name)], step=step)
    assert batches.in_order == in_order


def test_it_closes_and_tells_the_stall_of_the_input():
    source = Input()
    batches = SkippedBatches(source)
    batches.close()
    assert source.closed
    assert batches.stall_s == 1.5
