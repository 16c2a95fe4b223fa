"""Trajectories in a fixed order: the same batches in each run, also over restarts.

Actors take turns (`turn_order`). A turn may come earlier than those before it, and
waits for them; batches are given out in the order of turns. Each insert brings the
actor's snapshot after it, so the table knows the state of all actors at each batch: the
cut.

    a table that was started again is empty, and does not know the learner's position:
      insert, turn: wait for `begin`          take: raises TableRestartedError
    begin(cut): batches go on at the cut's; the next call of every actor returns the
      number of its next turn and the snapshot to go back to

So a process that is killed loses nothing that cannot be made again, and is made again
the same: a turn is a function of actor, number and version.
"""

import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_count, check_whole, check_word
from replicator.launchpad_bridge.trajectories import arguments
from replicator.launchpad_bridge.trajectories.handler_wait import wait_for
from replicator.launchpad_bridge.trajectories.row_checks import (
    RowChecks,
    counts_refused,
)
from replicator.launchpad_bridge.trajectories.rows import RowMemory
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    Cut,
    TableRestartedError,
    TableTimeoutError,
    Taken,
    TrajectoryError,
)
from replicator.launchpad_bridge.trajectories.turn_order import TurnOrder
from replicator.launchpad_bridge.trajectories.turn_progress import Held, TurnProgress

_BATCHES_BEYOND_LAG = 2  # the one that is taken next, and the one after it


class TrajectoryTurns:
    """A `Table` whose batches are those of turns in order.

    A node of a program: `lp.CourierNode(lp.TrajectoryTurns, actors, batch_size=32,
    rows_per_turn=4, lag=1)`.

    >>> table = TrajectoryTurns(["a", "b"], batch_size=2, rows_per_turn=1, lag=0)
    >>> table.begin(None)
    >>> table.turn("b")
    ActorTurn(number=0, version=0, snapshot=None, rows_per_turn=1)
    >>> for actor in "b", "a":
    ...     rows = {"reward": np.full((1, 1), ord(actor), np.float32)}
    ...     turn = table.insert(rows, actor=actor, version=0, number=0)
    >>> table.take(2, timeout_s=1).trajectories["reward"].tolist()
    [[97.0], [98.0]]
    """

    # Of its server: calls that wait must leave threads for those they wait for.
    thread_pool_size = 1024

    def __init__(
        self,
        actors: Sequence[str],
        *,
        batch_size: int,
        rows_per_turn: int,
        lag: int,
        like: PyTree = None,
        finite: Sequence[str] | None = None,
        on_nonfinite: Literal["keep", "raise"] = "keep",
        snapshot_bytes: int = 1 << 28,
        batches_ahead: int | None = None,
    ) -> None:
        """Make an empty table, which waits for `begin`.

        Args:
          actors: Names of the actors, in the order of turns.
          batch_size: Number of trajectories in a batch.
          rows_per_turn: Number of trajectories in each insert.
          lag: Policy lag of all batches but the first ones.
          like: See `TrajectoryQueue`.
          finite: See `TrajectoryQueue`.
          on_nonfinite: `"keep"` counts trajectories with NaN or infinity in them;
            `"raise"` raises at the actor. None is skipped: its place would be empty.
          snapshot_bytes: Memory for all snapshots; each has an equal share.
          batches_ahead: Number of batches for which turns are held, at least 1; by
            default two more than `lag`.

        Raises:
          ArgumentError: An argument breaks its rule.
        """
        check_word("on_nonfinite", on_nonfinite, ("keep", "raise"))
        self._order = TurnOrder(
            actors=list(actors) if not isinstance(actors, str) else actors,
            batch_size=batch_size,
            rows_per_turn=rows_per_turn,
            lag=lag,
        )
        check_count("snapshot_bytes", snapshot_bytes)
        if batches_ahead is None:
            batches_ahead = lag + _BATCHES_BEYOND_LAG
        check_count("batches_ahead", batches_ahead)
        self._most_turns = int(batches_ahead) * self._order.turns_per_batch
        # One of each turn that is held, and one of each actor before these.
        self._most_bytes = snapshot_bytes // (self._most_turns + len(actors))
        capacity = self._most_turns * self._order.rows_per_turn
        self._checks = RowChecks(capacity, like, finite, on_nonfinite)
        # Guards all below and the copying of rows, so `begin` may come at any moment.
        # Actors wait for each other's turns anyway. `_checks` is called outside of it.
        self._changed = threading.Condition()
        self._memory: RowMemory | None = None
        self._progress: TurnProgress | None = None  # None until `begin`
        self._counts = {"inserted": 0, "taken": 0, "ignored": 0, "ahead": 0}
        self._begun = 0

    @counts_refused
    @arguments.INSERT
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
        """Take in a turn; return the next one; see `Table.insert`.

        A turn that was there before is ignored; one too far ahead for the batches that
        are held waits.

        Raises:
          TrajectoryError: They are not `rows_per_turn` rows, or were acted with other
            variables than the turn's, too.
          TableTimeoutError: There was no room, or no learner, within the deadline.
          ArgumentError: The actor is not one of those given, or has no `number`.
        """
        self._check_actor(actor)
        check_whole("number", number)
        number = int(number or 0)  # None was refused
        arguments.check_snapshot(actor, snapshot, self._most_bytes)
        memory, leaves = self._checks.check(
            trajectories,
            actor=actor,
            fits=lambda count: self._check_turn(count, actor, version, number),
        )
        turn = self._order.turn_of(actor, number)
        with self._changed:
            self._wait_until(
                lambda now: number != now.next_of[actor] or turn < now.end_turn,
                f"`insert` of turn {number} of {actor}",
            )
            now = self._progress
            assert now is not None, "`_wait_until` waits for it"
            if number != now.next_of[actor]:
                self._counts["ignored" if number < now.next_of[actor] else "ahead"] += 1
                return self._turn_of(now, actor, with_snapshot=True)
            self._memory = memory
            memory.write(self._slots(turn, 1), leaves)
            now.held[turn] = Held(snapshot, [float(each) for each in episodes])
            now.next_of[actor] += 1
            self._counts["inserted"] += self._order.rows_per_turn
            self._changed.notify_all()
            return self._turn_of(now, actor, with_snapshot=False)

    @arguments.TURN
    def turn(self, actor: str) -> ActorTurn:
        """Return the next turn of an actor, with the snapshot to go back to.

        Raises:
          TableTimeoutError: No learner has called `begin` within the deadline.
          ArgumentError: The actor is not one of those given.
        """
        self._check_actor(actor)
        with self._changed:
            self._wait_until(lambda now: True, f"`turn` of {actor}")
            assert self._progress is not None, "`_wait_until` waits for it"
            return self._turn_of(self._progress, actor, with_snapshot=True)

    @arguments.TAKE
    def take(
        self,
        count: int,
        *,
        oldest: int | None = None,
        newest: int | None = None,
        timeout_s: float,
    ) -> Taken | None:
        """Take out the next batch; see `Table.take`.

        `count` must be `batch_size`, `oldest` at most the version of this batch: none
        is dropped. `newest` is not used: versions follow from numbers.
        """
        arguments.check_same_batch(count, self._order.batch_size)
        with self._changed:
            now = self._progress
            if now is None:
                raise TableRestartedError(
                    "`begin` must be called before `take`. Call it with the cut of the "
                    "last batch that was taken."
                )
            self._check_oldest(now, oldest)
            is_ready = wait_for(
                self._changed,
                lambda: self._progress is not now or now.is_ready(self._order),
                timeout_s=timeout_s,
            )
            if self._progress is not now:
                raise TableRestartedError(
                    "`begin` was called by another learner while this call waited. "
                    "Call `begin` again if this is the only learner."
                )
            return self._take_next(now) if is_ready else None

    @arguments.BEGIN
    def begin(self, cut: Cut | None) -> None:
        """Go on at the batch of a cut and drop all turns held; see `Table.begin`.

        Raises:
          ArgumentError: The cut is of other actors, or of another order of turns.
          TrajectoryError: A snapshot has more than its share of `snapshot_bytes`.
        """
        cut = cut or Cut(batch=0, snapshots=dict.fromkeys(self._order.actors))
        self._order.check_cut(cut)
        for actor, snapshot in cut.snapshots.items():
            arguments.check_snapshot(actor, snapshot, self._most_bytes)
        with self._changed:
            self._progress = TurnProgress(self._order, cut, self._most_turns)
            self._begun += 1
            self._changed.notify_all()

    @arguments.STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of trajectories, and of inserts that were not the next ones.

        `ignored` inserts were there before, `ahead` ones came before their turn was
        known; `begun` counts calls of `begin`, `dropped["begun"]` trajectories that
        these dropped; `waiting_for` names the next turn.
        """
        checks = self._checks.statistics()
        with self._changed:
            now = self._progress
            waiting = 0 if now is None else len(now.held) * self._order.rows_per_turn
            lost = self._counts["inserted"] - self._counts["taken"] - waiting
            return {
                **self._counts,
                "waiting": waiting,
                "capacity": self._most_turns * self._order.rows_per_turn,
                "begun": self._begun,
                "waiting_for": "a learner" if now is None else now.awaited(self._order),
                "dropped": {"begun": lost},
                **checks,
            }

    def _take_next(self, now: TurnProgress) -> Taken:
        turns = self._order.turns_of_batch(now.batch)
        assert self._memory is not None, "the first insert made it"
        trajectories = self._memory.read(self._slots(turns.start, len(turns)))
        version = self._order.version_of_batch(now.batch)
        episodes = now.pass_batch(self._order)
        self._counts["taken"] += self._order.batch_size
        self._changed.notify_all()
        return Taken(
            trajectories=trajectories,
            versions=np.full(self._order.batch_size, version, np.int64),
            episodes=episodes,
            cut=Cut(
                batch=now.batch,
                snapshots=dict(now.at_batch),
                order=self._order.to_json(),
            ),
        )

    def _slots(self, turn: int, count: int) -> np.ndarray:
        """Return the rows of consecutive turns."""
        start = turn % self._most_turns
        rows = self._order.rows_per_turn
        return np.arange(start * rows, (start + count) * rows)

    def _turn_of(
        self, now: TurnProgress, actor: str, *, with_snapshot: bool
    ) -> ActorTurn:
        number = now.next_of[actor]
        return ActorTurn(
            number=number,
            version=self._order.version_of(actor, number),
            snapshot=now.snapshot_of(self._order, actor) if with_snapshot else None,
            rows_per_turn=self._order.rows_per_turn,
        )

    def _wait_until(self, is_ready: Any, call: str) -> None:
        """Wait until a learner has called `begin`, and its progress is ready."""
        if wait_for(
            self._changed,
            lambda: self._progress is not None and is_ready(self._progress),
        ):
            return
        why = "the learner was to call `begin`"
        if self._progress is not None:
            why = (
                f"{len(self._progress.held)} of {self._most_turns} turns are held, and "
                f"{self._progress.awaited(self._order)} is next"
            )
        raise TableTimeoutError(f"{call} waited too long: {why}. Call it again.")

    def _check_actor(self, actor: str) -> None:
        if actor not in self._order.actors:
            raise ArgumentError(
                f"`actor` must be one of {', '.join(self._order.actors)}, got "
                f"{actor!r}. Give the table the names of all workers that act; one "
                "alone in its group has the group's name, without a number."
            )

    def _check_turn(self, count: int, actor: str, version: int, number: int) -> None:
        if count != self._order.rows_per_turn:
            raise TrajectoryError(
                "`rows_per_turn` of the table must be the number of rows in each insert"
                f", got {self._order.rows_per_turn}, and {count} trajectories of "
                f"{actor}. Use {count}; where it varies, as that of `items` does, an "
                "`lp.Actor` without `one_episode_per_trajectory` fills its turns."
            )
        due = self._order.version_of(actor, number)
        if number >= 0 and version == due:
            return
        raise TrajectoryError(
            f"Turn {number} of {actor} must be acted with version {due} of the "
            f"variables, got {version}. Use number and version as `turn` returned them."
        )

    def _check_oldest(self, now: TurnProgress, oldest: int | None) -> None:
        version = self._order.version_of_batch(now.batch)
        if oldest is not None and oldest > version:
            raise ArgumentError(
                f"`oldest` must be at most {version}, the version of batch "
                f"{now.batch}, got {oldest}. Bound the policy lag by "
                f"{self._order.lag} or more."
            )
