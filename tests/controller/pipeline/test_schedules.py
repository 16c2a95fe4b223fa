"""Schedules and their simulation: pure functions over data."""

import itertools

import pytest

from replicator.controller import StageOp, gpipe, interleaved, one_f_one_b
from replicator.controller.pipeline.simulation import simulate
from replicator.errors import ArgumentError

SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4, 5, 7, 8, 13)))


@pytest.mark.parametrize("schedule", [gpipe, interleaved])
def test_every_schedule_ends_for_any_stages_slices_and_microbatches(schedule):
    for slices, chunks, count in SIZES:
        stages = slices * chunks
        orders = schedule(stages, slices, count)
        found = simulate(orders, stages=stages, microbatches=count)
        assert len(found.spans) == 2 * stages * count


def test_one_f_one_b_is_the_interleaved_schedule_of_one_stage_a_slice():
    for slices, _, count in SIZES:
        assert one_f_one_b(slices, slices, count) == interleaved(slices, slices, count)


def test_one_f_one_b_holds_as_many_microbatches_as_stages_follow():
    found = simulate(one_f_one_b(4, 4, 16), stages=4, microbatches=16)
    assert list(found.live) == [4, 3, 2, 1]


def test_gpipe_holds_all_microbatches():
    found = simulate(gpipe(4, 4, 8), stages=4, microbatches=8)
    assert list(found.live) == [8, 8, 8, 8]


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_the_bubble_is_that_of_the_papers(schedule):
    found = simulate(schedule(4, 4, 16), stages=4, microbatches=16)
    assert found.bubble == pytest.approx(3 / 19, abs=1e-4)


def test_stages_that_are_interleaved_halve_the_bubble():
    found = simulate(interleaved(8, 4, 16), stages=8, microbatches=16)
    assert found.bubble == pytest.approx(1.5 / 17.5, abs=1e-4)


def test_ops_start_after_what_they_need_and_never_two_at_once_on_a_slice():
    found = simulate(interleaved(4, 2, 5), stages=4, microbatches=5)
    ends = {span.op: span.end for span in found.spans}
    busy = {0: 0.0, 1: 0.0}
    for span in found.spans:
        assert span.start >= busy[span.slice]
        busy[span.slice] = span.end
        if span.op.kind == "forward" and span.op.stage:
            assert span.start >= ends[span.op._replace(stage=span.op.stage - 1)]


def changed(number, ops):
    orders = [list(each) for each in one_f_one_b(2, 2, 2)]
    orders[number] = ops(orders[number])
    return lambda: simulate(orders, stages=2, microbatches=2)


BACKWARD = StageOp("backward", 1, 0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            changed(1, lambda ops: [*ops, BACKWARD]),
            "got backward of stage 1, microbatch 0 2 times",
        ),
        (
            changed(1, lambda ops: [op for op in ops if op != BACKWARD]),
            "got backward of stage 1, microbatch 0 0 times",
        ),
        (
            changed(0, lambda ops: [*ops, StageOp("forward", 0, 2)]),
            "got forward of stage 0, microbatch 2 1 times",
        ),
        (
            changed(0, lambda ops: [*ops, StageOp("forward", 0, -1)]),
            "got forward of stage 0, microbatch -1 1 times",
        ),
        (
            changed(0, lambda ops: [*ops, StageOp("forwards", 0, 0)]),
            "got forwards of stage 0, microbatch 0 1 times",
        ),
        (
            changed(1, lambda ops: [BACKWARD, *(op for op in ops if op != BACKWARD)]),
            "got backward of stage 1, microbatch 0 ahead of forward of stage 1",
        ),
        (
            changed(0, lambda ops: [*ops, BACKWARD]),
            "got backward of stage 1, microbatch 0 on slice 0",
        ),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_with_stage_and_microbatch(
    broken, message
):
    with pytest.raises(ArgumentError, match=message):
        broken()
