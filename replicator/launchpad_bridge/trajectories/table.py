"""What actors and learner say to whatever holds trajectories between them.

A trajectory is what one environment did in so many steps: one row of a pytree of
arrays. Leaves of what is inserted are [n, ...] for n trajectories, those of a batch
[B, ...].
Version v of the policy has v updates behind it; a trajectory's policy lag is the number
of updates that it has missed when it is learnt from.
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
    """The table was started again, and must be told where the learner stands."""


@rpc.register(name="replicator.TableTimeoutError")
class TableTimeoutError(ReplicatorError, TimeoutError):
    """The table could not do what was asked while somebody waited; ask again."""


@rpc.register(name="replicator.Turn")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorTurn:
    """What an actor is to do next.

    Attributes:
      number: Of its turn; None where actors go on as they please.
      version: Which variables to act with; None for the newest.
      snapshot: To go back to, first. With a number and without a snapshot, an actor
        that is not at this number begins anew.
    """

    number: int | None = None
    version: int | None = None
    snapshot: bytes | None = None


@rpc.register(name="replicator.Cut")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Where all actors stand if all batches before one are consumed, and no more.

    Attributes:
      batch: The number of the next one.
      snapshots: What each actor was after its last turn before it; None at its start.
      order: What says which turn is whose, plain JSON: numbers and snapshots mean
        nothing in another one. None: it is not known, and not compared.
    """

    batch: int
    snapshots: Mapping[str, bytes | None]
    order: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        coded = {
            actor: None if held is None else base64.b64encode(held).decode()
            for actor, held in self.snapshots.items()
        }
        order = None if self.order is None else dict(self.order)
        return {"batch": self.batch, "snapshots": coded, "order": order}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """Return what `to_json` wrote."""
        snapshots = {
            actor: None if held is None else base64.b64decode(held)
            for actor, held in said["snapshots"].items()
        }
        return cls(batch=said["batch"], snapshots=snapshots, order=said.get("order"))


@rpc.register(name="replicator.Taken")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """Trajectories for a batch.

    Attributes:
      trajectories: Leaves [count, ...].
      versions: int64 [count], of the policy of each.
      episodes: Returns of the episodes that ended since trajectories were taken last.
      cut: Where actors stand behind this batch; None where they take no turns.
    """

    trajectories: PyTree
    versions: np.ndarray
    episodes: Sequence[float] = ()
    cut: Cut | None = None


class Table(Protocol):
    """Holds trajectories: a queue, or what else learners take batches from."""

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
        """Take in trajectories; return what the actor is to do next.

        Args:
          trajectories: Leaves [n, ...].
          actor: Who acted.
          version: Of the variables that it acted with.
          number: Of the actor's turn, where actors take turns.
          snapshot: What the actor is now, where actors take turns.
          episodes: Returns of episodes that ended in these trajectories.

        Raises:
          TrajectoryError: They are of another form than the first.
          TableTimeoutError: There was no place for them within the call's deadline.
        """
        ...

    def turn(self, actor: str) -> ActorTurn:
        """Return what an actor that starts, or lost its place, is to do.

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
        """Take out trajectories for a batch; None if they are not there in time.

        Args:
          count: How many.
          oldest: Those of a version below it are dropped; None drops none.
          newest: Those of a version above it are dropped. A learner that went back to
            its checkpoint says so how far it is: what was acted with variables that it
            had and lost would pass for younger than it is.
          timeout_s: How long to wait.

        Raises:
          TableRestartedError: It was not told by `begin` where the learner stands.
        """
        ...

    def begin(self, cut: Cut | None) -> None:
        """Learn where the learner stands; where actors take turns, drop what is held.

        Args:
          cut: Of the learner's checkpoint; None for a run's beginning.
        """
        ...

    def statistics(self) -> dict[str, Any]:
        """Return counts of what happened so far."""
        ...
