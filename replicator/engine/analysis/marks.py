"""Marks of the replication proof: facts about one value of a step, and their join."""

from collections.abc import Sequence
from typing import NamedTuple


class Origin(NamedTuple):
    """Source of a mark: the primitive, and the user's line."""

    what: str
    where: str


class Noise(NamedTuple):
    """Random numbers that every replica and microbatch draws alike.

    Attributes:
      origin: Source of the numbers.
      by_example: Whether they were drawn with an axis as long as that of the examples.
      on_weights: Whether they were added to weights, or multiplied by them: then they
        only make the weights noisy.
    """

    origin: Origin
    by_example: bool = False
    on_weights: bool = False


class Reduced(NamedTuple):
    """A reduction over all replicas.

    Attributes:
      origin: Source of the reduction.
      factors: Numbers that its result was multiplied by; None for one not known.
    """

    origin: Origin
    factors: frozenset[float | None] = frozenset()


class Mark(NamedTuple):
    """Facts about one value of the step.

    Attributes:
      varying: Why it may differ between replicas; the next three then do not matter.
      noise: Random numbers that it follows from, the same on every replica.
      weights: Whether it follows from arrays of the state.
      reduced: A reduction over all replicas that it follows from, other than of
        gradients.
      carried: A reduction that brought cotangents of other replicas' losses into it.
    """

    varying: Origin | None = None
    noise: Noise | None = None
    weights: bool = False
    reduced: Reduced | None = None
    carried: Origin | None = None


CLEAN = Mark()
STATE = Mark(weights=True)
BATCH = Mark(varying=Origin("the batch", ""))
DECLARED = Mark(varying=Origin("a `PerReplica` leaf", ""))


def join(marks: Sequence[Mark]) -> Mark:
    """Return the mark of a value that follows from values with `marks`.

    >>> join([STATE, BATCH]).varying.what
    'the batch'
    """
    joined = CLEAN
    for mark in marks:
        # Most are one of few objects, and this runs for every equation.
        if mark is CLEAN or mark is joined:
            continue
        if joined is CLEAN or (mark.varying and not (joined.varying or joined.carried)):
            joined = mark
        elif not joined.varying or mark.carried:
            joined = _both(joined, mark)
    return joined


def _both(one: Mark, other: Mark) -> Mark:
    varying = one.varying or other.varying
    carried = one.carried or other.carried
    if varying:
        return Mark(varying=varying, carried=carried)
    return Mark(
        noise=_louder(one.noise, other.noise),
        weights=one.weights or other.weights,
        reduced=_less_multiplied(one.reduced, other.reduced),
        carried=carried,
    )


def _less_multiplied(one: Reduced | None, other: Reduced | None) -> Reduced | None:
    if one is None or other is None:
        return one or other
    return one._replace(factors=one.factors & other.factors)


def _louder(one: Noise | None, other: Noise | None) -> Noise | None:
    if one is None or other is None:
        return one or other
    ranks = [(not each.on_weights, each.by_example) for each in (one, other)]
    return one if ranks[0] >= ranks[1] else other
