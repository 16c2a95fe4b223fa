"""The order of turns: actor, batch and version of the variables of each. Pure.

Turn t is of actor t mod A, in the order in which actors were given, and is that actor's
turn number t div A. A turn has N trajectories, a batch B: turn t is in batch b, t·N div
B. The learner takes batch b after b updates; its turns are acted with the
variables of `lag` updates before.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicator.errors import ArgumentError, check_count
from replicator.launchpad_bridge.trajectories.table import Cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnOrder:
    """The rule of a run; the same after every restart.

    Attributes:
      actors: Names of the actors, in order.
      batch_size: Number of trajectories in a batch.
      rows_per_turn: Number of trajectories in a turn.
      lag: Updates that each batch's trajectories have missed, but for the first ones.

    Raises:
      ArgumentError: An argument breaks its rule.

    >>> order = TurnOrder(actors=["a", "b"], batch_size=2, rows_per_turn=1, lag=1)
    >>> order.version_of("a", number=3), order.number_at_batch("b", batch=5)
    (2, 5)
    """

    actors: Sequence[str]
    batch_size: int
    rows_per_turn: int
    lag: int

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("rows_per_turn", 1), ("lag", 0)):
            check_count(name, getattr(self, name), f"Use {least}.", least=least)
            # NumPy's are no JSON, as cuts are.
            object.__setattr__(self, name, int(getattr(self, name)))
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
        """Return the order as plain JSON; equal for equal orders."""
        return dataclasses.asdict(self) | {"actors": list(self.actors)}

    def check_cut(self, cut: Cut) -> None:
        """Raise if a cut is of another order of turns.

        Args:
          cut: Its `order` is the `to_json` of the table that made it, or None.

        Raises:
          ArgumentError: The cut is of other actors, or of another order.
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
        """Return the number of turns in a batch."""
        return self.batch_size // self.rows_per_turn

    def turns_of_batch(self, batch: int) -> range:
        """Return the turns of a batch.

        >>> order = TurnOrder(actors=["a"], batch_size=4, rows_per_turn=2, lag=0)
        >>> order.turns_of_batch(3)
        range(6, 8)
        """
        first = batch * self.turns_per_batch
        return range(first, first + self.turns_per_batch)

    def actor_of(self, turn: int) -> str:
        """Return the actor of a turn."""
        return self.actors[turn % len(self.actors)]

    def turn_of(self, actor: str, number: int) -> int:
        """Return the turn, counted over all actors, of an actor's turn number."""
        return number * len(self.actors) + self.actors.index(actor)

    def version_of_batch(self, batch: int) -> int:
        """Return the version that the trajectories of a batch are acted with.

        >>> order = TurnOrder(actors=["a"], batch_size=2, rows_per_turn=2, lag=2)
        >>> [order.version_of_batch(batch) for batch in range(5)]
        [0, 0, 0, 1, 2]
        """
        return max(0, batch - self.lag)

    def version_of(self, actor: str, number: int) -> int:
        """Return the version that an actor's turn is acted with."""
        turn = self.turn_of(actor, number)
        return self.version_of_batch(turn // self.turns_per_batch)

    def number_at_batch(self, actor: str, batch: int) -> int:
        """Return the number of turns of an actor before a batch."""
        turns, place = batch * self.turns_per_batch, self.actors.index(actor)
        return max(0, -(-(turns - place) // len(self.actors)))
