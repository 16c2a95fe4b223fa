"""A plain replay table, Reverb's rule for one row, and episodes to make items of."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import replicator.launchpad_bridge as lp

CAPACITY = 100  # no power of two
_OBSERVED = ("observation", "first", "last", "age")


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


@dataclasses.dataclass
class PlainWalk:
    """One environment: an observation is the episode's number, and its steps so far.

    Attributes:
      sizes: Number of transitions of each episode; those of odd numbers are cut by
        time, the last one by the end of the walk.
      steps: What an unroll of all steps has.
    """

    sizes: dict[int, int]
    steps: dict[str, Any]

    def reward(self, number: int, age: int) -> float:
        """Return the reward with an observation."""
        return float(number + 8 * age)

    def discount(self, number: int, age: int) -> float:
        """Return the environment's discount with it: 0 where it terminated."""
        is_over = age == self.sizes[number] and number % 2 == 0
        return float(not is_over or number == max(self.sizes))

    def unrolls(self, length: int) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield unrolls, which share an observation, and whether one is the last."""
        count = self.steps["reward"].shape[1]
        for first in range(0, count, length):
            one = {
                name: leaf[:, first : first + length + (name in _OBSERVED)]
                for name, leaf in self.steps.items()
            }
            yield one | {"extras": {}}, first + length >= count


def plain_walk(random: np.random.Generator, *, steps: int) -> PlainWalk:
    """Walk through episodes of 1 to 9 transitions."""
    number = age = 0
    size = int(random.integers(1, 10))
    seen = [(number, age, size)]
    sizes: dict[int, int] = {0: 0}
    for _ in range(steps):
        if age == size:
            number, age, size = number + 1, 0, int(random.integers(1, 10))
        else:
            age += 1
        sizes[number] = age
        seen.append((number, age, size))
    if not age:  # the walk ended with a reset
        del sizes[number]
    numbers, ages, ends = np.array(seen).T
    walk = PlainWalk(sizes, {})
    after = list(zip(numbers.tolist(), ages.tolist(), strict=True))[1:]
    found = {
        "observation": np.stack([numbers, ages], axis=1),
        "first": ages == 0,
        "last": ages == ends,
        "age": ages,
        "action": np.zeros(steps),
        "reward": np.array([walk.reward(*each) * (each[1] > 0) for each in after]),
        "discount": np.array(
            [float(age > 0 and walk.discount(n, age)) for n, age in after if n in sizes]
            + [0.0] * (0 if age else 1)
        ),
    }
    walk.steps = {name: leaf[None] for name, leaf in found.items()}
    return walk


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
