"""Which turn is whose, in which batch it is, and what it is acted with. Pure.

Turn t is of actor t mod A, in the order in which actors were given, and is that actor's
turn number t div A. A turn has N trajectories, a batch B: turn t is in batch t·N div B,
which is learnt from after so many updates, and is acted with the variables that had
`lag` updates fewer behind them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicator.errors import ArgumentError, check_count, check_whole
from replicator.launchpad_bridge.trajectories.table import Cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnOrder:
    """The rule of a run; the same after every restart.

    Attributes:
      actors: Their names, in order.
      batch_size: Trajectories in a batch.
      rows_per_turn: Trajectories in a turn.
      lag: Updates that each batch's trajectories have missed, but for the first ones.

    Raises:
      ArgumentError: An argument breaks its rule.
    """

    actors: Sequence[str]
    batch_size: int
    rows_per_turn: int
    lag: int

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_count("rows_per_turn", self.rows_per_turn)
        check_whole("lag", self.lag)
        if self.lag < 0:
            raise ArgumentError(f"`lag` must be at least 0, got {self.lag}. Use 1.")
        if isinstance(self.actors, str) or not self.actors:
            raise ArgumentError(
                f"`actors` must be a list of names, got {self.actors!r}. Pass the "
                'names of the workers: `["actor/0", "actor/1"]`.'
            )
        if len(set(self.actors)) != len(self.actors):
            raise ArgumentError(
                f"`actors` must differ, got {list(self.actors)}. Pass each name once."
            )
        if self.batch_size % self.rows_per_turn:
            raise ArgumentError(
                "`batch_size` must be a multiple of `rows_per_turn`, got "
                f"{self.batch_size} and {self.rows_per_turn}. Use "
                f"{-(-self.batch_size // self.rows_per_turn) * self.rows_per_turn}."
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON; equal for equal orders."""
        return dataclasses.asdict(self) | {"actors": list(self.actors)}

    def check_cut(self, cut: Cut) -> None:
        """Refuse a cut of other turns.

        Args:
          cut: With what `to_json` returned where it was made, if that is known.

        Raises:
          ArgumentError: It is of other actors, or of another order.
        """
        if cut.order is not None and dict(cut.order) != self.to_json():
            raise ArgumentError(
                f"`cut` must be of this table's order, {self.to_json()}, got one of "
                f"{dict(cut.order)}. Go on as the run was begun, or begin it anew."
            )
        if set(cut.snapshots) != set(self.actors):
            raise ArgumentError(
                "`cut` must be of the actors of this table, got "
                f"{', '.join(sorted(cut.snapshots))} for "
                f"{', '.join(sorted(self.actors))}. Start as many as before."
            )

    @property
    def turns_per_batch(self) -> int:
        """Return how many turns are in a batch."""
        return self.batch_size // self.rows_per_turn

    def turns_of_batch(self, batch: int) -> range:
        """Return the turns that are in a batch."""
        first = batch * self.turns_per_batch
        return range(first, first + self.turns_per_batch)

    def actor_of(self, turn: int) -> str:
        """Return whose a turn is."""
        return self.actors[turn % len(self.actors)]

    def turn_of(self, actor: str, number: int) -> int:
        """Return which of all turns is this one of an actor."""
        return number * len(self.actors) + self.actors.index(actor)

    def version_of_batch(self, batch: int) -> int:
        """Return which variables the trajectories of a batch are acted with."""
        return max(0, batch - self.lag)

    def version_of(self, actor: str, number: int) -> int:
        """Return which variables a turn is acted with."""
        turn = self.turn_of(actor, number)
        return self.version_of_batch(turn // self.turns_per_batch)

    def number_at_batch(self, actor: str, batch: int) -> int:
        """Return how many turns of an actor lie before a batch."""
        turns, place = batch * self.turns_per_batch, self.actors.index(actor)
        return max(0, -(-(turns - place) // len(self.actors)))
