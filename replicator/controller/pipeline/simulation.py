"""Simulate a schedule before it runs: when each op runs, and whether all of them do."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from replicator.controller.pipeline.schedules import Orders, StageOp
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledOp:
    """When an op runs, and on which slice; in units of a forward."""

    op: StageOp
    slice: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A schedule that was simulated.

    Attributes:
      spans: All ops, each after those that it needs.
      live: For each stage, the most microbatches that wait for their backward at once.
      bubble: Share of the time that slices wait.
    """

    spans: Sequence[ScheduledOp]
    live: Sequence[int]
    bubble: float


def simulate(
    orders: Orders,
    *,
    stages: int,
    microbatches: int,
    forward: float = 1.0,
    backward: float = 2.0,
) -> Simulation:
    """Run a schedule on paper.

    Args:
      orders: For each slice, its ops.
      stages: Number of stages.
      microbatches: Number of microbatches.
      forward: Duration of each forward; moves take no time.
      backward: Duration of each backward.

    Raises:
      ArgumentError: An op is missing, there twice, on another slice than its stage, or
        ahead of what it needs.

    >>> from replicator.controller.pipeline.schedules import one_f_one_b
    >>> simulate(one_f_one_b(4, 4, 16), stages=4, microbatches=16).live
    [4, 3, 2, 1]
    """
    _check(orders, stages, microbatches)
    lengths = {"forward": forward, "backward": backward}
    ends: dict[StageOp, float] = {}
    spans: list[ScheduledOp] = []
    at, free = [0] * len(orders), [0.0] * len(orders)
    while len(ends) < 2 * stages * microbatches:
        before = len(ends)
        for number, ops in enumerate(orders):
            while at[number] < len(ops):
                op = ops[at[number]]
                needs = _needs(op, stages)
                if any(need not in ends for need in needs):
                    break
                start = max([free[number], *(ends[need] for need in needs)])
                end = free[number] = ends[op] = start + lengths[op.kind]
                spans.append(ScheduledOp(op=op, slice=number, start=start, end=end))
                at[number] += 1
        if len(ends) == before:
            raise _stuck(orders, at, ends, stages)
    spans.sort(key=lambda span: (span.start, span.slice))
    whole = max(free) * len(orders)
    busy = stages * microbatches * (forward + backward)
    return Simulation(
        spans=spans, live=_live(spans, stages), bubble=round(1 - busy / whole, 4)
    )


def _check(orders: Orders, stages: int, microbatches: int) -> None:
    counts = Counter(op for ops in orders for op in ops)
    for number, ops in enumerate(orders):
        for op in ops:
            if op.stage % len(orders) != number:
                raise ArgumentError(
                    f"`schedule` must run stage k on slice k modulo {len(orders)}, got "
                    f"{op} on slice {number}. Move it to the list of slice "
                    f"{op.stage % len(orders)}."
                )
    every = [
        StageOp(kind, stage, microbatch)
        for kind in ("forward", "backward")
        for stage in range(stages)
        for microbatch in range(microbatches)
    ]
    known = frozenset(every)
    for op in [*every, *counts]:
        if counts[op] != 1 or op not in known:
            raise ArgumentError(
                f"`schedule` must have each op of {stages} stages and {microbatches} "
                f"microbatches once, got {op} {counts[op]} times. Have it return "
                "every one, and no other."
            )


def _needs(op: StageOp, stages: int) -> list[StageOp]:
    """Return the ops whose results an op takes."""
    if op.kind == "forward":
        return [op._replace(stage=op.stage - 1)] if op.stage else []
    own = op._replace(kind="forward")
    after = [op._replace(stage=op.stage + 1)] if op.stage + 1 < stages else []
    return [own, *after]


def _stuck(
    orders: Orders, at: Sequence[int], ends: dict[StageOp, float], stages: int
) -> ArgumentError:
    """Return the error of a schedule in which no slice can go on."""
    waiting = [ops[n] for ops, n in zip(orders, at, strict=True) if n < len(ops)]
    pairs = [
        (op, need) for op in waiting for need in _needs(op, stages) if need not in ends
    ]
    # One that its own slice would run later is the cause; else they wait in a circle.
    own = [(a, b) for a, b in pairs if (a.stage - b.stage) % len(orders) == 0]
    op, missing = (own or pairs)[0]
    return ArgumentError(
        f"`schedule` must run an op after what it needs, got {op} ahead of {missing}, "
        "for which all slices wait. Put it later in the list of its slice."
    )


def _live(spans: Sequence[ScheduledOp], stages: int) -> list[int]:
    alive, most = [0] * stages, [0] * stages
    for span in spans:
        stage = span.op.stage
        alive[stage] += 1 if span.op.kind == "forward" else -1
        most[stage] = max(most[stage], alive[stage])
    return most
