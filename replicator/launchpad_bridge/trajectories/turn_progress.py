"""Position of a table of turns: the next batch, and the turns held for it."""

from collections.abc import Sequence
from typing import NamedTuple

from replicator.launchpad_bridge.trajectories.table import Cut
from replicator.launchpad_bridge.trajectories.turn_order import TurnOrder


class Held(NamedTuple):
    """Parts of a held turn beside its rows."""

    snapshot: bytes | None
    episodes: Sequence[float]


class TurnProgress:
    """Position of batches and actors since the last `begin`.

    Attributes:
      batch: Number of the next batch.
      at_batch: Snapshot of each actor after its last turn before that batch.
      next_of: Number of the next turn to be inserted, by actor.
      held: Turns that wait.
      end_turn: First turn that there is no room for.
    """

    def __init__(self, order: TurnOrder, cut: Cut, most_turns: int) -> None:
        self.batch = cut.batch
        self.at_batch = dict(cut.snapshots)
        self.next_of = {
            actor: order.number_at_batch(actor, cut.batch) for actor in order.actors
        }
        self.held: dict[int, Held] = {}
        self.end_turn = order.turns_of_batch(cut.batch).start + most_turns

    def is_ready(self, order: TurnOrder) -> bool:
        """Return whether all turns of the next batch are held."""
        return all(turn in self.held for turn in order.turns_of_batch(self.batch))

    def pass_batch(self, order: TurnOrder) -> list[float]:
        """Go on to the next batch; return the episodes that ended in this one."""
        episodes: list[float] = []
        for turn in order.turns_of_batch(self.batch):
            held = self.held.pop(turn)
            self.at_batch[order.actor_of(turn)] = held.snapshot
            episodes += held.episodes
        self.batch += 1
        self.end_turn += order.turns_per_batch
        return episodes

    def snapshot_of(self, order: TurnOrder, actor: str) -> bytes | None:
        """Return the snapshot of an actor after its last turn."""
        last = self.held.get(order.turn_of(actor, self.next_of[actor] - 1))
        return self.at_batch[actor] if last is None else last.snapshot

    def awaited(self, order: TurnOrder) -> str:
        """Name the first turn that is missing."""
        actor = min(order.actors, key=lambda one: order.turn_of(one, self.next_of[one]))
        return f"turn {self.next_of[actor]} of {actor}"
