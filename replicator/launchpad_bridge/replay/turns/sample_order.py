"""The order of samples where actors take turns: settings of a run. Pure.

New rows come in batches of their own. W of them, as many as `min_size` needs, are in
before the learner's batch 0, and one more before each batch after it; those that come
in right before batch b are acted with version b - lag.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicator.errors import ArgumentError, check_count
from replicator.launchpad_bridge.replay.samplers import ReplaySampler
from replicator.launchpad_bridge.replay.turns.numbered_draws import NumberedDraws
from replicator.launchpad_bridge.replay.turns.ring_rows import RingRows
from replicator.launchpad_bridge.trajectories.table import Cut

_SAMPLERS = ("uniform", "prioritised")
_COUNTS = ("batch_size", "new_rows_per_batch", "rows_per_turn", "capacity", "min_size")
_LEAST = dict.fromkeys((*_COUNTS, "priority_lag"), 1) | {"lag": 0, "seed": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The rule of a run, the same after every restart; `ReplayTurns` explains each.

    Raises:
      ArgumentError: An argument breaks its rule.

    >>> order = SampleOrder(
    ...     actors=["a", "b"],
    ...     batch_size=4,
    ...     new_rows_per_batch=2,
    ...     rows_per_turn=1,
    ...     lag=1,
    ...     capacity=8,
    ...     min_size=3,
    ...     sampler=lp.uniform(),
    ...     priority_lag=4,
    ...     seed=0,
    ... )
    >>> order.first_batches, order.versions(np.arange(10))
    (2, array([0, 0, 0, 0, 0, 0, 1, 1, 2, 2]))
    """

    actors: Sequence[str]
    batch_size: int
    new_rows_per_batch: int
    rows_per_turn: int
    lag: int
    capacity: int
    min_size: int
    sampler: ReplaySampler
    priority_lag: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_count(name, getattr(self, name), f"Use {least}.", least=least)
            # NumPy's are no JSON, as cuts are.
            object.__setattr__(self, name, int(getattr(self, name)))
        sampler, turn = self.sampler, self.rows_per_turn
        if not isinstance(sampler, ReplaySampler) or sampler.name not in _SAMPLERS:
            raise ArgumentError(
                "`sampler` must be one that `lp.uniform` or `lp.prioritised` returns, "
                f"where actors take turns, got {sampler!r}. Pass `lp.uniform()`."
            )
        if self.new_rows_per_batch % turn:
            raise ArgumentError(
                "`new_rows_per_batch` must be a multiple of `rows_per_turn`, got "
                f"{self.new_rows_per_batch} and {turn}. Use "
                f"{-(-self.new_rows_per_batch // turn) * turn}."
            )
        least = self.first_batches * self.new_rows_per_batch
        if self.capacity < least:
            raise ArgumentError(
                f"`capacity` must be at least {least}, the rows before the first batch,"
                f" got {self.capacity}. Use {4 * least}."
            )

    @property
    def first_batches(self) -> int:
        """W, the number of batches of new rows before the learner's first one."""
        return -(-self.min_size // self.new_rows_per_batch)

    @property
    def insertion_lag(self) -> int:
        """Lag of batches of new rows, whose number is W - 1 above the learner's."""
        return self.lag + self.first_batches - 1

    @property
    def has_priorities(self) -> bool:
        """Whether batches wait for the priorities of those before."""
        return self.sampler.name != "uniform"

    def versions(self, serials: np.ndarray) -> np.ndarray:
        """Return the version of the policy of rows, by serials: both int64 [n]."""
        return np.maximum(serials // self.new_rows_per_batch - self.insertion_lag, 0)

    def new_draws(self) -> NumberedDraws:
        """Return the records of a table without rows."""
        return NumberedDraws(
            RingRows(self.capacity, self.sampler),
            batch_size=self.batch_size,
            priority_lag=self.priority_lag if self.has_priorities else None,
            seed=self.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the rule as plain JSON; equal for equal ones."""
        return {
            **{
                each.name: getattr(self, each.name) for each in dataclasses.fields(self)
            },
            "actors": list(self.actors),
            "sampler": self.sampler.name,
            "exponent": self.sampler.exponent,
            "priority_lag": self.priority_lag if self.has_priorities else None,
        }

    def check_cut(self, cut: Cut, journal_id: str | None = None) -> None:
        """Raise if a cut is of a table with another rule, or of another run.

        Raises:
          ArgumentError: It is.
        """
        if cut.order is None:
            return
        found = dict(cut.order)
        made_by = found.pop("journal", None)
        other = [k for k, v in self.to_json().items() if found.pop(k, None) != v]
        if other or found:
            raise ArgumentError(
                "`cut` must be of this table's settings, got one of other "
                f"{', '.join([*other, *found])}. Go on as the run was begun, or begin "
                "it anew."
            )
        if journal_id is not None and made_by != journal_id:
            raise ArgumentError(
                "`cut` must be of the run in `checkpoint_dir`, got one of another run. "
                "Give each run a directory of its own, or begin it anew."
            )
