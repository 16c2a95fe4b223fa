"""What the scheduler is told, and what it does: plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from replicator.controller.islands.protocol import Key


class PlacedResult(NamedTuple):
    """Where a result is; bytes are of each device, 0 where none are counted."""

    island: str
    slice: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueuedRun:
    """What is decided by, of a run.

    Attributes:
      number: Its number; those of later calls are larger.
      client: Number of its client.
      ops: Number of its ops on each island.
      takes: Results of other runs that it takes.
      donates: Those whose memory it takes.
      makes: Its results.
      most_bytes: By slice that keeps memory, how much more lives there at the most.
      limits: By such a slice, its `memory_bytes`.
    """

    number: int
    client: int
    ops: Mapping[str, int]
    takes: frozenset[Key] = frozenset()
    donates: frozenset[Key] = frozenset()
    makes: Mapping[Key, PlacedResult] = dataclasses.field(default_factory=dict)
    most_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)


class ClientJoined(NamedTuple):
    """A client is there; ops of others have its weight in proportion."""

    client: int
    weight: float


class ClientLeft(NamedTuple):
    """A client left: nothing of it starts any more, and what it held is freed."""

    client: int


class OpEnded(NamedTuple):
    """An op of a run ended, after so many seconds times devices; None: it was lost."""

    run: int
    island: str
    device_s: float | None


class FutureDropped(NamedTuple):
    """Nobody refers to a result any more."""

    key: Key


class SliceClosed(NamedTuple):
    """A slice was given back: what lives on it is freed."""

    slice: str


class IslandJoined(NamedTuple):
    """Runs may have ops on one more island."""

    island: str


class IslandLost(NamedTuple):
    """What lives on an island is gone; its runs end as others do, with errors."""

    island: str


class Closing(NamedTuple):
    """No event but ends and drops comes any more."""


CancelReason = Literal["left", "memory", "closed"]
"""Its client or another's left; memory will never be free; `pw` was closed."""

ScheduleEvent = (
    QueuedRun
    | ClientJoined
    | ClientLeft
    | OpEnded
    | FutureDropped
    | SliceClosed
    | IslandJoined
    | IslandLost
    | Closing
)


class StartRun(NamedTuple):
    """Send a run to its islands."""

    run: int


class CancelRun(NamedTuple):
    """Fail the results of a run, which will not start."""

    run: int
    reason: CancelReason


class ForgetValue(NamedTuple):
    """Make an island forget a result, after the runs that were sent there."""

    island: str
    key: Key


class EndRun(NamedTuple):
    """All ops of a run ended."""

    run: int


ScheduleAction = StartRun | CancelRun | ForgetValue | EndRun
