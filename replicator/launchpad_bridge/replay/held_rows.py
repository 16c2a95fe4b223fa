"""Records of the rows that a replay table holds: keys, versions and priorities.

    reserve ── (the table copies the rows) ── publish ──▶ held ── draw ──▶ held
       ▲                                                    │           └─▶ used up
       └── free ◀── release ◀───────────────────────────────┴── make room

It knows neither threads nor the contents of rows. The key of a row is a multiple of a
power of two plus the number of its place, so a key leads to its place without a search;
each use of a place has a key of its own.
"""

import secrets
from collections import deque
from typing import NamedTuple

import numpy as np

from replicator.base.types import PyTree
from replicator.launchpad_bridge.replay.removers import REMOVERS, RemoverName
from replicator.launchpad_bridge.replay.samplers import ReplaySampler

_GONE = -1  # in place of the key of a row
_KEY_BITS = 42  # of the keys of one table; the others tell tables apart


def any_first_key() -> int:
    """Return the key that a table begins with.

    Also after a restart no key is used again, by all odds, and late ones are known as
    those of another table. (The calendar would do, if it never went back.)

    >>> any_first_key() < 1 << 63
    True
    """
    return secrets.randbits(63 - _KEY_BITS) << _KEY_BITS


class DrawnRows(NamedTuple):
    """Rows for a batch.

    Attributes:
      slots: Their places, int64 [n].
      keys: int64 [n].
      versions: int64 [n].
      probabilities: float64 [n], with which each was drawn.
      used_up: Places of those that are no longer held, int64 [m]; to be released once
        they are read.
    """

    slots: np.ndarray
    keys: np.ndarray
    versions: np.ndarray
    probabilities: np.ndarray
    used_up: np.ndarray


class SavedRows(NamedTuple):
    """Rows of a segment that are held.

    Attributes:
      rows: Leaves [n, ...].
      keys: int64 [n].
      versions: int64 [n].
      priorities: float64 [n].
      times: int64 [n], how often each was drawn.
    """

    rows: PyTree
    keys: np.ndarray
    versions: np.ndarray
    priorities: np.ndarray
    times: np.ndarray


class HeldRows:
    """Records of the rows of a table; for one thread at a time.

    Attributes:
      held: Number of rows.
      largest: Largest priority that a row was given so far.
    """

    def __init__(
        self,
        capacity: int,
        *,
        sampler: ReplaySampler,
        remover: RemoverName,
        max_times_sampled: int | None,
        first_key: int,
    ) -> None:
        """Make the records of an empty table; no key is below `first_key`."""
        self.held = 0
        self.largest = 0.0
        self._capacity = capacity
        self._sampler = sampler
        self._draws = sampler.start(capacity)
        self._removal = REMOVERS[remover](capacity)
        self._free = deque(range(capacity))
        self._places = 1 << (capacity - 1).bit_length()
        self.keys = np.full(capacity, _GONE, np.int64)
        self._first_key = -(-first_key // self._places) * self._places
        self._next_keys = self._first_key + np.arange(capacity)
        self.versions = np.zeros(capacity, np.int64)
        self.priorities = np.zeros(capacity)
        self._serials = np.zeros(capacity, np.int64)  # order of insertion
        self._next_serial = 0
        self._most_times = max_times_sampled
        self._left = None if max_times_sampled is None else np.zeros(capacity, np.int64)
        self._oldest: int | None = None  # lowest version that is drawn
        self._is_drawn = np.zeros(capacity, bool)  # a row, and not below `_oldest`
        self._lowest_drawn = 0  # no version that is drawn is below
        # Places and keys of rows since the last save; None where there are none.
        self._unsaved: list[np.ndarray] | None = None
        # Keys, sorted, and places of rows of a checkpoint, whose keys are of a table
        # before this one, and lead to other places; and those that are not sorted yet.
        self._restored = np.zeros((2, 0), np.int64)
        self._unsorted: list[np.ndarray] = []

    @property
    def drawable(self) -> int:
        """Number of rows that may be drawn."""
        return self._draws.size

    @property
    def too_old(self) -> int:
        """Number of rows below the lowest version that is drawn."""
        return self.held - int(np.count_nonzero(self._is_drawn))

    @property
    def room(self) -> int:
        """Number of rows that `reserve` may be asked for."""
        return len(self._free) + self.held

    def can_draw(self, count: int) -> bool:
        """Return whether as many rows can be drawn."""
        if self._left is None or self._draws.size >= count:
            return self._draws.size > 0
        return self._draws_left() >= count

    def missing(self, count: int) -> str | None:
        """Return why as many rows cannot be drawn; None if they can."""
        if self.can_draw(count):
            return None
        if not self.held:
            return "rows: the table is empty"
        if self._draws.size:
            left = self._draws_left()
            return f"draws: `max_times_sampled` leaves {left} for a batch of {count}"
        too_old = self.too_old
        if too_old < self.held:
            return f"a priority above 0: all of {self.held - too_old} rows have 0"
        return f"rows that may be drawn: {too_old} of {self.held} are too old"

    def reserve(self, count: int) -> tuple[np.ndarray, int]:
        """Return free places, int64 [count], and how many rows went for them."""
        lacking = max(count - len(self._free), 0)
        if lacking:
            slots = self._removal.pop(lacking)
            self._forget(slots)
            self._free.extend(slots.tolist())
        return np.array([self._free.popleft() for _ in range(count)], np.int64), lacking

    def publish(
        self, slots: np.ndarray, version: int, priorities: np.ndarray | None
    ) -> None:
        """Hold the rows in reserved places, int64 [n], in this order.

        Args:
          slots: The places.
          version: Version of the policy of all of them.
          priorities: float64 [n]; None for the largest so far.
        """
        if priorities is None:
            priorities = np.full(len(slots), self.largest or 1.0)
        self.keys[slots] = self._next_keys[slots]
        self._next_keys[slots] += self._places
        if self._left is not None and self._most_times is not None:
            self._left[slots] = self._most_times
        if self._unsaved is not None:
            self._unsaved.append(np.stack([slots, self.keys[slots]]))
        self._hold(slots, np.full(len(slots), version), priorities)

    def restore(self, slots: np.ndarray, saved: SavedRows) -> None:
        """Hold rows of a checkpoint in reserved places, int64 [n], in this order."""
        self.keys[slots] = saved.keys
        if self._left is not None and self._most_times is not None:
            self._left[slots] = np.maximum(self._most_times - saved.times, 1)
        self._unsorted.append(np.array([saved.keys, slots]))
        self._hold(slots, saved.versions, saved.priorities)

    def _hold(
        self, slots: np.ndarray, versions: np.ndarray, priorities: np.ndarray
    ) -> None:
        self.versions[slots] = versions
        self.priorities[slots] = priorities
        self._serials[slots] = self._next_serial + np.arange(len(slots))
        self._next_serial += len(slots)
        self.held += len(slots)
        self.largest = max(self.largest, float(priorities.max(initial=0.0)))
        self._removal.add(slots, priorities)
        self._lowest_drawn = min(self._lowest_drawn, int(versions.min(initial=1 << 62)))
        if self._oldest is not None:
            is_drawn = versions >= self._oldest
            slots, priorities = slots[is_drawn], priorities[is_drawn]
        self._is_drawn[slots] = True
        self._draws.add(slots, priorities)

    def release(self, slots: np.ndarray) -> None:
        """Give back places, int64 [n], that hold no row."""
        self._free.extend(slots.tolist())

    def draw(self, count: int, random: np.random.Generator) -> DrawnRows:
        """Draw rows, where `can_draw` allows it."""
        slots, probabilities = self._draws.draw(random.random(count), self._left)
        if self._left is None:
            return self._drawn(slots, probabilities)
        parts: list[DrawnRows] = []
        while True:
            # A row that is drawn too often is drawn again: as if one were drawn after
            # the other, each from what is left.
            is_left = _times_before(slots) < self._left[slots]
            slots, probabilities = slots[is_left], probabilities[is_left]
            np.subtract.at(self._left, slots, 1)
            parts.append(self._drawn(slots, probabilities))
            self.remove(parts[-1].used_up)
            count -= len(slots)
            if not count:
                return DrawnRows(*map(np.concatenate, zip(*parts, strict=True)))
            slots, probabilities = self._draws.draw(random.random(count), self._left)

    def remove(self, slots: np.ndarray) -> None:
        """Hold rows no longer, int64 [n]; their places are free once released."""
        self._removal.remove(slots)
        self._forget(slots)

    def update(self, keys: np.ndarray, priorities: np.ndarray) -> int:
        """Give rows other priorities; return how many keys are of rows that went.

        Args:
          keys: int64 [n].
          priorities: float64 [n]; of one key twice the last counts.
        """
        slots = self._slots_of(keys)
        is_held = self.keys.take(slots, mode="clip") == keys
        late = len(keys) - int(np.count_nonzero(is_held))
        if late:
            slots, priorities = slots[is_held], priorities[is_held]
        if not len(slots):
            return late
        slots, last = np.unique(slots[::-1], return_index=True)
        priorities = priorities[::-1][last]
        self.largest = max(self.largest, float(priorities.max()))
        self.priorities[slots] = priorities
        self._removal.update(slots, priorities)
        if self._oldest is not None:
            is_drawn = self._is_drawn[slots]
            slots, priorities = slots[is_drawn], priorities[is_drawn]
        self._draws.update(slots, priorities)
        return late

    def was_given(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys, int64 [n], may be of a row: bool [n]."""
        slots = keys & (self._places - 1)
        newest = self._next_keys.take(slots, mode="clip")
        is_given = (slots < self._capacity) & (keys < newest)
        return (keys >= 0) & (is_given | self._is_of_another(keys))

    def _is_of_another(self, keys: np.ndarray) -> np.ndarray:
        """Return which keys another table gave, which this one may stand for."""
        return keys >> _KEY_BITS != self._first_key >> _KEY_BITS

    def _slots_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the place that each key may be in."""
        slots = keys & (self._places - 1)
        if self._unsorted:
            found = np.concatenate([self._restored, *self._unsorted], axis=1)
            self._restored, self._unsorted = found[:, np.argsort(found[0])], []
        if self._restored.size:
            is_old = self._is_of_another(keys)
            at = np.searchsorted(self._restored[0], keys[is_old])
            slots[is_old] = self._restored[1].take(at, mode="clip")
        return slots

    def save_from_now_on(self) -> None:
        """Keep the places and keys of new rows for `new_rows`."""
        self._unsaved = []

    def new_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return places and keys, int64 [n], of rows since the last call, in order."""
        found = [np.zeros((2, 0), np.int64), *(self._unsaved or [])]
        slots, keys = np.concatenate(found, axis=1)
        self._unsaved = []
        return slots, keys

    def times(self) -> np.ndarray:
        """Return how often each row was drawn, int64 [capacity], where it counts."""
        if self._left is None or self._most_times is None:
            return np.zeros(self._capacity, np.int64)
        return self._most_times - self._left

    def draw_from(self, oldest: int | None) -> None:
        """Draw no rows of a version below `oldest` from now on; None: draw any."""
        before, self._oldest = self._oldest, oldest
        if oldest == before:
            return
        if oldest is None or (before is not None and oldest < before):
            self._begin_draws()
        elif oldest > self._lowest_drawn:
            slots = np.flatnonzero(self._is_drawn & (self.versions < oldest))
            self._is_drawn[slots] = False
            self._draws.remove(slots)
            drawn = self.versions[self._is_drawn]
            self._lowest_drawn = int(drawn.min(initial=1 << 62))

    def _begin_draws(self) -> None:
        """Make the sampler's state anew, over all rows that may be drawn."""
        lowest = -1 if self._oldest is None else self._oldest
        self._is_drawn = (self.keys != _GONE) & (self.versions >= lowest)
        slots = np.flatnonzero(self._is_drawn)
        slots = slots[np.argsort(self._serials[slots])]
        self._lowest_drawn = int(self.versions[slots].min(initial=1 << 62))
        self._draws = self._sampler.start(self._capacity)
        self._draws.add(slots, self.priorities[slots])

    def _draws_left(self) -> int:
        """Return how often rows may be drawn yet, under a `max_times_sampled`."""
        assert self._left is not None, "without one any number may be drawn"
        return int(self._left[self._draws.rows()].sum())

    def _drawn(self, slots: np.ndarray, probabilities: np.ndarray) -> DrawnRows:
        used_up = slots[:0]
        if self._left is not None:
            used_up = np.unique(slots[self._left[slots] == 0])
        return DrawnRows(
            slots, self.keys[slots], self.versions[slots], probabilities, used_up
        )

    def _forget(self, slots: np.ndarray) -> None:
        """Hold rows, int64 [n], that the remover knows no longer, no longer."""
        self.keys[slots] = _GONE
        self.held -= len(slots)
        self._draws.remove(slots[self._is_drawn[slots]])
        self._is_drawn[slots] = False


def _times_before(slots: np.ndarray) -> np.ndarray:
    """Return how often each number occurs before its place.

    >>> _times_before(np.array([5, 3, 5, 5]))
    array([0, 0, 1, 2])
    """
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    firsts = np.searchsorted(ordered, ordered)
    times = np.empty(len(slots), np.int64)
    times[order] = np.arange(len(slots)) - firsts
    return times
