"""Where a table of turns stands: the next batch, and the turns that wait for it."""

from collections.abc import Sequence
from typing import NamedTuple

from replicator.launchpad_bridge.trajectories.table import Cut
from replicator.launchpad_bridge.trajectories.turn_order import TurnOrder


class Held(NamedTuple):
    """What is known of a turn beside its rows."""

    snapshot: bytes | None
    episodes: Sequence[float]


class TurnProgress:
    """Where batches and actors stand since the last `begin`.

    Attributes:
      batch: The number of the next one.
      at_batch: What each actor was after its last turn before that.
      next_of: The number of the next turn to be inserted, by actor.
      held: Turns that wait.
      end_turn: The first one that there is no room for.
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
        """Return whether all turns of the next batch are there."""
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
        """Return what an actor was after its last turn."""
        last = self.held.get(order.turn_of(actor, self.next_of[actor] - 1))
        return self.at_batch[actor] if last is None else last.snapshot

    def awaited(self, order: TurnOrder) -> str:
        """Name the first turn that is not there."""
        actor = min(order.actors, key=lambda one: order.turn_of(one, self.next_of[one]))
        return f"turn {self.next_of[actor]} of {actor}"
