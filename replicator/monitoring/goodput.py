"""Compute the share of a run's time in steps that were kept, and all other shares.

A run may have many processes, one after the other. Each notes every few seconds the
time in each phase (`phases` events, see `phase_journal`); so of one that was killed all
but the last seconds are known. Steps after the checkpoint from which the next
one went on were done in vain: their time is lost, too.

Within a process all is measured by a monotonic clock. Only from the last note of one to
the start of the next the calendar counts, and one that went back counts as no time.
"""

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

USEFUL_PHASE = "step"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Time of a run by use. All seconds add up to `wall_s`.

    Attributes:
      useful_s: Seconds in steps that were kept, with the host's work during them.
      wall_s: From the first process's start of the run to the last one's last note.
      lost_s: Lost seconds by cause: the phases other than `step`; `redone`, steps that
        were done again; `launch`, from a process's start until its run began, imports
        included; `down`, from the last note of a process until the next was started.
      sessions: Number of processes of the run, one after the other.
    """

    useful_s: float
    wall_s: float
    lost_s: dict[str, float]
    sessions: int

    @property
    def share(self) -> float:
        """The useful part, 0 to 1; 0 if there was no time."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput:
    """Add up the time of a run.

    Steps of a process between its last note and its end are taken to have been as fast
    as those before; the next process's first step shows which of them were kept.

    Args:
      events: Result of `read_events`. Only the first process's `phases` events count. A
        rollback inside a process shows as a note of an earlier step.

    >>> goodput([]).share
    0.0
    """
    sessions = _sessions(events)
    account = _Account()
    for before, session in zip([None, *sessions], sessions, strict=False):
        if before is not None:
            account.add_gap(before, session)
        account.add_session(session)
    useful_s = sum(piece.seconds for piece in account.pieces)
    lost_s = {cause: spent_s for cause, spent_s in account.lost_s.items() if spent_s}
    return Goodput(
        useful_s=useful_s,
        wall_s=useful_s + sum(lost_s.values()),
        lost_s=lost_s,
        sessions=len(sessions),
    )


class _Note(NamedTuple):
    """Note of a process at one moment about its time so far."""

    wall_s: float  # by the calendar
    step: int
    seconds: Mapping[str, float]
    launch_s: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def useful_s(self) -> float:
        return self.seconds.get(USEFUL_PHASE, 0.0)


_Session: TypeAlias = list[_Note]


class _Piece(NamedTuple):
    """Steps after `first` up to `last`, and their time."""

    first: int
    last: int
    seconds: float

    def until(self, step: int) -> "_Piece":
        """Keep the part of it up to `step`."""
        if self.first >= step:
            return _Piece(step, step, 0.0)
        kept = (step - self.first) / (self.last - self.first)
        return _Piece(self.first, step, self.seconds * kept)


class _Account:
    """Time so far: pieces of steps that still stand, and what is lost."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []  # in the order of their steps
        self.lost_s: dict[str, float] = {}

    def add_session(self, notes: _Session) -> None:
        """Count the time of a process, which began with a known step."""
        first, last = notes[0], notes[-1]
        self._go_back_to(first.step)
        self._add_steps(first.step, first.step, first.useful_s)
        for before, after in pairwise(notes):
            self._go_back_to(after.step)
            start = min(before.step, after.step)
            self._add_steps(start, after.step, after.useful_s - before.useful_s)
        for cause, spent_s in last.seconds.items():
            if cause != USEFUL_PHASE:
                self._lose(cause, spent_s)

    def add_gap(self, before: _Session, after: _Session) -> None:
        """Count the time from a process's last note to the start of the next."""
        last, first = before[-1], after[0]
        gap_s = max(0.0, first.wall_s - first.total_s - last.wall_s)
        launch_s = min(first.launch_s, gap_s)
        down_s = gap_s - launch_s
        unseen_s = min(down_s, _unseen_s(before, first.step))
        if unseen_s:
            self._add_steps(last.step, first.step, unseen_s)
        self._lose("launch", launch_s)
        self._lose("down", down_s - unseen_s)

    def _add_steps(self, first: int, last: int, seconds: float) -> None:
        self.pieces.append(_Piece(first, last, seconds))

    def _go_back_to(self, step: int) -> None:
        # Pieces lie in the order of their steps: only the newest can reach beyond.
        while self.pieces and self.pieces[-1].last > step:
            piece = self.pieces.pop()
            rest = piece.until(step)
            self._lose("redone", piece.seconds - rest.seconds)
            if rest.seconds:
                self.pieces.append(rest)

    def _lose(self, cause: str, seconds: float) -> None:
        self.lost_s[cause] = self.lost_s.get(cause, 0.0) + seconds


def _unseen_s(notes: _Session, kept_step: int) -> float:
    """Estimate the time of steps that were saved after the process's last note."""
    unseen, seen = kept_step - notes[-1].step, notes[-1].step - notes[0].step
    if unseen <= 0 or seen <= 0:
        return 0.0
    return unseen * notes[-1].useful_s / seen


def _sessions(events: Iterable[Mapping[str, Any]]) -> list[_Session]:
    """Group the notes by process, in the order of their first."""
    found: dict[str, _Session] = {}
    for event in events:
        if event["kind"] == "phases" and event.get("process", 0) == 0:
            found.setdefault(event.get("session", ""), []).append(_note(event))
    return list(found.values())


def _note(event: Mapping[str, Any]) -> _Note:
    return _Note(
        wall_s=datetime.datetime.fromisoformat(event["time"]).timestamp(),
        step=event["step"],
        seconds=event["seconds"],
        launch_s=event.get("launch_s", 0.0),
    )
