"""Reverb's words for a table, and what they are here.

    Table(name, sampler, remover, max_size, rate_limiter)        a `ReplayTable`
    selectors     Uniform, Prioritized, Fifo, Lifo               samplers
                  Fifo, MinHeap                                  removers
    rate_limiters MinSize, SampleToInsertRatio                   a `RateLimiter`

A word that has no equivalent here is refused where it is written.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicator.errors import ArgumentError, check_count
from replicator.launchpad_bridge.replay.rate_limiter import RateLimiter
from replicator.launchpad_bridge.replay.removers import RemoverName
from replicator.launchpad_bridge.replay.replay_table import ReplayTable
from replicator.launchpad_bridge.replay.samplers import (
    ReplaySampler,
    fifo,
    lifo,
    prioritised,
    uniform,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Selector:
    """A selector of Reverb, as a sampler, a remover or both.

    Attributes:
      name: Its name in Reverb.
      sampler: Our sampler; None if there is none.
      remover: Our remover; None if there is none.
    """

    name: str
    sampler: ReplaySampler | None = None
    remover: RemoverName | None = None


def Uniform() -> Selector:
    """Return a selector of any item, with the same probability."""
    return Selector(name="Uniform", sampler=uniform())


def Prioritized(priority_exponent: float) -> Selector:
    """Return a selector by priority to the power of an exponent.

    Raises:
      ArgumentError: The exponent is out of range.
    """
    sampler = prioritised(exponent=priority_exponent)
    return Selector(name="Prioritized", sampler=sampler)


def Fifo() -> Selector:
    """Return a selector of the oldest item."""
    return Selector(name="Fifo", sampler=fifo(), remover="oldest")


def Lifo() -> Selector:
    """Return a selector of the newest item."""
    return Selector(name="Lifo", sampler=lifo())


def MinHeap() -> Selector:
    """Return a selector of the item of the lowest priority."""
    return Selector(name="MinHeap", remover="lowest")


def MinSize(min_size_to_sample: int) -> RateLimiter:
    """Return a limiter of samples until there are so many items.

    Raises:
      ArgumentError: The number is below 1.
    """
    return RateLimiter(min_size=min_size_to_sample)


def SampleToInsertRatio(
    samples_per_insert: float, min_size_to_sample: int, error_buffer: float
) -> RateLimiter:
    """Return a limiter of the ratio of samples to inserts.

    Raises:
      ArgumentError: A number is out of range; `error_buffer` must be one number.
    """
    return RateLimiter(
        min_size=min_size_to_sample,
        samples_per_insert=samples_per_insert,
        error=error_buffer,
    )


@dataclasses.dataclass(frozen=True)
class ReverbTable:
    """`reverb.Table`: a table that is made where its server is.

    Attributes:
      name: Name, for clients.
      sampler: Selector of what is sampled.
      remover: Selector of what is removed from a full table.
      max_size: Most items.
      rate_limiter: Of `rate_limiters`.
      max_times_sampled: Samples of an item, after which it is removed; 0: any number.
      extensions: None are possible.
      signature: Not used: the first item says what all are like.

    Raises:
      ArgumentError: An attribute has no equivalent here, or breaks its rule.
    """

    name: str
    sampler: Selector
    remover: Selector
    max_size: int
    rate_limiter: RateLimiter
    max_times_sampled: int = 0
    extensions: Sequence[Any] = ()
    signature: Any = None

    def __post_init__(self) -> None:
        check_count("max_size", self.max_size)
        samplers = "`Uniform()`, `Prioritized(...)`, `Fifo()` or `Lifo()`"
        for name, fits in (
            ("sampler", samplers),
            ("remover", "`Fifo()` or `MinHeap()`"),
        ):
            selector = getattr(self, name)
            is_one = isinstance(selector, Selector)
            if not is_one or getattr(selector, name) is None:
                found = f"`{selector.name}`" if is_one else repr(selector)
                raise ArgumentError(
                    f"`{name}` must be one of {fits} here, got {found}. Use one of "
                    "these."
                )
        if self.extensions:
            raise ArgumentError(
                f"`extensions` must be empty here, got {self.extensions!r}. Leave them "
                "out."
            )

    def make(self) -> ReplayTable:
        """Make it, empty."""
        assert self.sampler.sampler is not None, "`__post_init__` checks it"
        assert self.remover.remover is not None, "`__post_init__` checks it"
        return ReplayTable(
            self.max_size,
            sampler=self.sampler.sampler,
            remover=self.remover.remover,
            limiter=self.rate_limiter,
            max_times_sampled=self.max_times_sampled or None,
            finite=(),
        )
