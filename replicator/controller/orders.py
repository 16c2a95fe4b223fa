"""Lists of orders: when values are forgotten, and what depends on each."""

import dataclasses
from collections.abc import Iterator, Sequence

from replicator.controller.islands.protocol import (
    Call,
    Drop,
    Order,
    Put,
    Receive,
    Send,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An order, the island that executes it, and what it is for people."""

    island: str
    order: Order
    text: str


def with_drops(steps: Sequence[Step], kept: set[int]) -> Iterator[Step]:
    """Yield steps; what nothing uses after one of them is forgotten there.

    What is sent and not forgotten is marked: another run may donate it.

    Args:
      steps: Orders of all islands.
      kept: Values that are kept.
    """
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        order = step.order
        if isinstance(order, Call):
            last.update(dict.fromkeys((*order.inputs, *order.outputs), at))
        elif isinstance(order, Send):
            # Its number there is the receiver's to drop.
            last[order.input] = at
        elif isinstance(order, Put | Receive):
            last[order.output] = at
    ends: dict[int, list[int]] = {}
    for value, at in last.items():
        if value not in kept:
            ends.setdefault(at, []).append(value)
    for at, step in enumerate(steps):
        order = step.order
        if isinstance(order, Send):
            order = dataclasses.replace(order, is_kept=order.input in kept)
        yield dataclasses.replace(step, order=order)
        if at in ends:
            order = Drop(values=tuple(ends[at]))
            yield Step(island=step.island, order=order, text="")


def behind(steps: Sequence[Step], results: set[int]) -> dict[int, frozenset[int]]:
    """Return the results that depend on each value, by a walk from the last order."""
    found: dict[int, frozenset[int]] = {each: frozenset({each}) for each in results}
    for step in reversed(steps):
        order = step.order
        if isinstance(order, Call):
            inputs, outputs = order.inputs, order.outputs
        elif isinstance(order, Send):
            inputs, outputs = (order.input,), (order.output,)
        else:
            continue
        reached = frozenset().union(*(found.get(each, ()) for each in outputs))
        for each in inputs:
            found[each] = found.get(each, frozenset()) | reached
        for each in outputs:
            found[each] = found.get(each, frozenset()) | reached
    return found
