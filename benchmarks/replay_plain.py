"""A plain replay table, one row after the other, and Reverb's rule for one row."""

import dataclasses
from collections.abc import Mapping

import replicator.launchpad_bridge as lp

CAPACITY = 100  # no power of two


@dataclasses.dataclass
class PlainRow:
    """Priority of a row, and how often it was drawn."""

    priority: float
    drawn: int = 0


class PlainTable:
    """What a replay table holds."""

    def __init__(self, remover: str = "oldest") -> None:
        self.rows: dict[int, PlainRow] = {}  # by number, in the order of insertion
        self.largest, self.inserted, self.taken = 0.0, 0, 0
        self._remover = remover

    def insert(self, priorities: Mapping[int, float | None]) -> None:
        """Insert rows once there is room for all; None is the largest priority."""
        while len(self.rows) + len(priorities) > CAPACITY:
            del self.rows[self._goes()]
        for number, given in priorities.items():
            value = (self.largest or 1.0) if given is None else given
            self.rows[number] = PlainRow(value)
            self.largest = max(self.largest, value)
        self.inserted += len(priorities)

    def update(self, priorities: Mapping[int, float]) -> None:
        """Give the rows that are still there other priorities."""
        for number in self.rows.keys() & priorities.keys():
            self.rows[number].priority = priorities[number]
            self.largest = max(self.largest, priorities[number])

    def draw(self, number: int, most: int) -> None:
        """Count a draw of a row; it goes with the one numbered `most`."""
        self.rows[number].drawn += 1
        if self.rows[number].drawn == most:
            del self.rows[number]

    def chances(self, exponent: float | None) -> dict[int, float]:
        """Return the probability of each row; of all alike for None."""
        masses = {
            number: 1.0
            if exponent is None
            else (row.priority > 0) * row.priority**exponent
            for number, row in self.rows.items()
        }
        return {number: mass / sum(masses.values()) for number, mass in masses.items()}

    def _goes(self) -> int:
        if self._remover == "oldest":
            return next(iter(self.rows))
        return min(self.rows, key=lambda number: self.rows[number].priority)


def may_insert(limiter: lp.RateLimiter, inserted: int, taken: int) -> bool:
    """`CanInsert(1)` of Reverb's `rate_limiter.cc`, of a table that removes nothing."""
    ratio, error = limiter.samples_per_insert or 0.0, limiter.error or 0.0
    ahead = (inserted + 1) * ratio - taken
    is_filling = inserted + 1 <= limiter.min_size
    return is_filling or ahead <= ratio * limiter.min_size + error


def may_take(limiter: lp.RateLimiter, inserted: int, taken: int) -> bool:
    """`CanSample(1)`."""
    ratio, error = limiter.samples_per_insert or 0.0, limiter.error or 0.0
    ahead = inserted * ratio - taken - 1
    return inserted >= limiter.min_size and ahead >= ratio * limiter.min_size - error
