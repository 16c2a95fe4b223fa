"""Act, insert, sample and learn in turn: an agent with a replay table in one process.

The table and the items are those of a program. A turn makes `steps_per_call` updates
by one compiled call; their priorities are given back before the next turn.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import replicator
import replicator.launchpad_bridge as lp
from experiments import in_turn
from experiments.off_policy import OffPolicy
from experiments.returns import Learned
from replicator.launchpad_bridge import acting
from replicator.training.session import Session


def learn(
    rep: replicator.Replicator,
    agent: OffPolicy,
    environment: acting.VectorEnvironment,
    table: lp.ReplayTable,
    *,
    items: acting.Items,
    batch_size: int,
    steps_per_call: int,
    least: int,
    **options: Any,
) -> Learned:
    """Learn from samples of a table, which is filled anew at each sitting.

    Args:
      rep: Where it learns.
      agent: What acts and learns.
      environment: Where it acts.
      table: What it keeps; not saved.
      items: Makes the table's rows of unrolls.
      batch_size: Rows that an update learns from.
      steps_per_call: Updates in a turn.
      least: Rows in the table before the first update.
      **options: Others of `in_turn.sit`.
    """

    def turns(session: Session, player: in_turn.Player) -> Iterator[None]:
        filler = _Filler(player, table, items)
        player.follow(session)
        held = 0
        while held < least:
            held += filler.play(session.steps_done)
        for update in session.steps():
            taken = table.take(batch_size * steps_per_call, timeout_s=60)
            assert taken is not None  # rows are there
            given = session.step(batches_of(taken, steps_per_call))
            # Acts while the devices learn, by the policy of the turn before.
            filler.play(update - 1)
            player.follow(session)
            assert taken.keys is not None, "of a replay table"
            priorities = np.ravel(given["priority"])
            known = np.isfinite(priorities)  # another leaves its row as it was
            table.update_priorities(taken.keys[known], priorities[known])
            yield

    return in_turn.sit(
        rep,
        agent,
        environment,
        turns,
        updates_per_unroll=steps_per_call,
        step_fn=agent.step_fn,
        steps_per_call=steps_per_call,
        **options,
    )


def batches_of(taken: Any, count: int) -> dict[str, Any]:
    """Return a sample as the batches of so many updates, leaves [count, rows, ...]."""
    batch = {
        "trajectories": taken.trajectories,
        "probability": taken.probabilities.astype(np.float32),
    }
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]) if count > 1 else leaf,
        batch,
    )


class _Filler:
    """Fills a table with what a player does."""

    def __init__(
        self, player: in_turn.Player, table: lp.ReplayTable, items: acting.Items
    ) -> None:
        self._player, self._table, self._items = player, table, items
        self._waiting: Any = None  # what the unroll before left for items of the next

    def play(self, version: int) -> int:
        """Make an unroll by the policy of a version; return the number of its rows."""
        unrolled = self._player.unroll(version)
        rows, self._waiting = self._items(unrolled, self._waiting, ends=False)
        if rows is None:
            return 0
        self._table.insert(rows, actor="actor/0", version=version)
        return len(rows["reward"])
