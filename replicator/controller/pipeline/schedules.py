"""Schedules of pipelines, as data: for each slice, its ops in their order.

A schedule is a function of the numbers of stages, slices and microbatches. Stage k runs
on slice k modulo the number of slices, so with more stages than slices each slice has
several. GPipe: Huang et al. 2019. One forward, one backward: Narayanan et al. 2019,
"PipeDream". Interleaved: Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters", §2.2.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from replicator.errors import ArgumentError


class StageOp(NamedTuple):
    """The forward or the backward of a stage, for one microbatch."""

    kind: Literal["forward", "backward"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Orders = Sequence[Sequence[StageOp]]
"""For each slice, its ops in their order."""

Schedule = Callable[[int, int, int], Orders]
"""Takes the numbers of stages, slices and microbatches."""


def gpipe(stages: int, slices: int, microbatches: int) -> list[list[StageOp]]:
    """Return GPipe's schedule: all forwards, then all backwards.

    A slice holds what all microbatches need for their backwards.

    >>> ops = gpipe(2, 2, 3)[0]
    >>> [(op.kind[0], op.microbatch) for op in ops]
    [('f', 0), ('f', 1), ('f', 2), ('b', 0), ('b', 1), ('b', 2)]
    """
    return [
        _alternating(at, stages, slices, microbatches, first=stages * microbatches)
        for at in range(slices)
    ]


def one_f_one_b(stages: int, slices: int, microbatches: int) -> list[list[StageOp]]:
    """Return the schedule that runs each backward as soon as it can.

    As long as GPipe's; of stage k at most `stages - k` microbatches are alive.

    Raises:
      ArgumentError: Slices have several stages.

    >>> ops = one_f_one_b(2, 2, 3)[0]
    >>> [(op.kind[0], op.microbatch) for op in ops]
    [('f', 0), ('f', 1), ('b', 0), ('f', 2), ('b', 1), ('b', 2)]
    """
    if stages != slices:
        raise ArgumentError(
            f"`schedule` must have one stage on each slice, got {stages} stages on "
            f"{slices} slices for 'one_f_one_b'. Use 'interleaved'."
        )
    return [
        _alternating(at, stages, slices, microbatches, first=slices - at - 1)
        for at in range(slices)
    ]


def interleaved(stages: int, slices: int, microbatches: int) -> list[list[StageOp]]:
    """Return the schedule of several stages a slice: a shorter bubble, more moves.

    With v stages on each slice the slices wait for a v-th of the time.

    >>> ops = interleaved(4, 2, 2)[0]
    >>> [(op.kind[0], op.stage, op.microbatch) for op in ops[:4]]
    [('f', 0, 0), ('f', 0, 1), ('f', 2, 0), ('f', 2, 1)]
    """
    # Before the first backward, each stage of a slice but the last runs one group.
    extra = (stages // slices - 1) * max(map(len, _groups(slices, microbatches)))
    return [
        _alternating(
            at,
            stages,
            slices,
            microbatches,
            first=(slices - at - 1) * (2 if extra else 1) + extra,
        )
        for at in range(slices)
    ]


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
}
"""By the names that `pw.pipeline` takes."""


def _alternating(
    at: int, stages: int, slices: int, microbatches: int, *, first: int
) -> list[StageOp]:
    """Return `first` forwards, then one forward and one backward in turn."""
    own = range(at, stages, slices)
    forwards, backwards = [], []
    for group in _groups(slices, microbatches):
        forwards += [StageOp("forward", k, m) for k in own for m in group]
        backwards += [StageOp("backward", k, m) for k in reversed(own) for m in group]
    ops = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        ops += [forward, backward]
    return ops + backwards[max(0, len(forwards) - first) :]


def _groups(slices: int, microbatches: int) -> list[range]:
    """Return runs of as many microbatches as slices; the last one has what is left."""
    count = max(1, microbatches // slices)
    ends = [*(n * slices for n in range(1, count)), microbatches]
    return [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
