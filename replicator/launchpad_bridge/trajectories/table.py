"""Interface of tables, which hold trajectories between actors and the learner.

A trajectory is a number of steps of one environment: one row of a pytree of arrays.
Inserted leaves are [n, ...] for n trajectories, those of a batch [B, ...]. Version v of
the policy has v updates behind it; a trajectory's policy lag is the number of updates
that it has missed when it is learnt from.
"""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from replicator import rpc
from replicator.base.types import PyTree
from replicator.errors import ReplicatorError


@rpc.register(name="replicator.TrajectoryError")
class TrajectoryError(ReplicatorError, ValueError):
    """Trajectories of an actor are not of the form of the others."""


@rpc.register(name="replicator.TableRestartedError")
class TableRestartedError(ReplicatorError, RuntimeError):
    """The table was started again; the learner must call `begin` first."""


@rpc.register(name="replicator.TableTimeoutError")
class TableTimeoutError(ReplicatorError, TimeoutError):
    """The table could not answer before the call's deadline; call it again."""


@rpc.register(name="replicator.Turn")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorTurn:
    """Next unroll of an actor, as its table requires it.

    Attributes:
      number: Number of the actor's turn; None in a table without turns.
      version: Version of the variables to act with; None for the newest.
      snapshot: State to go back to first. With a number and without a snapshot, an
        actor that is not at this number begins anew.
      rows_per_turn: Number of rows that its insert must have; None for any.
    """

    number: int | None = None
    version: int | None = None
    snapshot: bytes | None = None
    rows_per_turn: int | None = None


@rpc.register(name="replicator.Cut")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """State of all actors when exactly the batches before one are consumed.

    Attributes:
      batch: Number of the next batch.
      snapshots: Snapshot of each actor after its last turn before it; None at its
        start.
      order: Order of turns as plain JSON: numbers and snapshots mean nothing in
        another order. None if it is unknown; then it is not compared.
    """

    batch: int
    snapshots: Mapping[str, bytes | None]
    order: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the cut as plain JSON.

        >>> Cut(batch=3, snapshots={"actor/0": b"ab"}).to_json()
        {'batch': 3, 'snapshots': {'actor/0': 'YWI='}, 'order': None}
        """
        coded = {
            actor: None if held is None else base64.b64encode(held).decode()
            for actor, held in self.snapshots.items()
        }
        order = None if self.order is None else dict(self.order)
        return {"batch": self.batch, "snapshots": coded, "order": order}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Self:
        """Return the cut that `to_json` wrote.

        >>> Cut.from_json({"batch": 3, "snapshots": {"actor/0": "YWI="}}).snapshots
        {'actor/0': b'ab'}
        """
        snapshots = {
            actor: None if held is None else base64.b64decode(held)
            for actor, held in saved["snapshots"].items()
        }
        return cls(batch=saved["batch"], snapshots=snapshots, order=saved.get("order"))


@rpc.register(name="replicator.Taken")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """Trajectories for a batch.

    Attributes:
      trajectories: Leaves [count, ...].
      versions: int64 [count], version of the policy of each.
      episodes: Returns of the episodes that ended since the last batch was taken.
      cut: State of actors behind this batch; None in a table without turns.
      keys: int64 [count], the key of each row in a replay table: of no other row, ever.
        None in a table that gives each row out once.
      probabilities: float64 [count], with which each was drawn; None likewise.
    """

    trajectories: PyTree
    versions: np.ndarray
    episodes: Sequence[float] = ()
    cut: Cut | None = None
    keys: np.ndarray | None = None
    probabilities: np.ndarray | None = None


class Table(Protocol):
    """Holds trajectories between actors and the learner.

    The methods of its implementations have the same arguments; their docstrings give
    the differences.
    """

    def insert(
        self,
        trajectories: PyTree,
        *,
        actor: str,
        version: int,
        number: int | None = None,
        snapshot: bytes | None = None,
        episodes: Sequence[float] = (),
    ) -> ActorTurn:
        """Take in trajectories; return the next turn of the actor.

        Args:
          trajectories: Leaves [n, ...].
          actor: Name of the actor.
          version: Version of the variables that it acted with.
          number: Number of the actor's turn, in a table with turns.
          snapshot: State of the actor after it, in a table with turns.
          episodes: Returns of episodes that ended in these trajectories.

        Raises:
          TrajectoryError: They have another form than the first, or are not finite; or
            another argument breaks its rule.
          TableTimeoutError: There was no room for them within the call's deadline.
          ArgumentError: The table can never take them.
        """
        ...

    def turn(self, actor: str) -> ActorTurn:
        """Return the turn of an actor that starts, or lost its place.

        Raises:
          TableTimeoutError: No learner has called `begin` within the call's deadline.
        """
        ...

    def take(
        self,
        count: int,
        *,
        oldest: int | None = None,
        newest: int | None = None,
        timeout_s: float,
    ) -> Taken | None:
        """Take trajectories for a batch; None if they are not there in time.

        A queue, and a table of turns, give each out once; a replay table draws a
        sample of what it holds, and keeps it.

        Args:
          count: Number of trajectories.
          oldest: Lowest version; a queue drops trajectories below it, a replay table
            does not draw them. None for any.
          newest: Highest version; a queue drops trajectories above it. They were acted
            with variables that a learner had and lost when it went back to its
            checkpoint, and would pass for younger than they are. A replay table has
            no use for it. None for any.
          timeout_s: Longest wait in seconds.

        Raises:
          TableRestartedError: `begin` was not called since the table started, or was
            called by another learner while this call waited.
          ArgumentError: `count` or `oldest` break a rule of the table.
        """
        ...

    def begin(self, cut: Cut | None) -> None:
        """Go on from the learner's position; a table with turns drops what it holds.

        Args:
          cut: Cut in the learner's checkpoint; None for the beginning of a run.

        Raises:
          ArgumentError: The cut is of other actors, or of another order of turns.
        """

    def statistics(self) -> dict[str, Any]:
        """Return counts of trajectories and inserts so far."""
        ...
