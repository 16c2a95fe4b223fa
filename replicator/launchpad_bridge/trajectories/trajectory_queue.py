"""A bounded queue of trajectories, for actors that take no turns.

    insert ── check ── reserve rows ── copy ── waiting ──▶ take: oldest first, copy
                           │ none free: block, or drop the oldest or the newest
    free rows ◀────────────┴───────────────────────────────── rows that were taken

Memory for all rows is there from the first insert on. A trajectory is copied into it
once, so the message that brought it (shared memory of its sender, on one host) goes
back when `insert` returns; and out of it once, into a batch.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_count, check_word
from replicator.launchpad_bridge.trajectories import arguments
from replicator.launchpad_bridge.trajectories.handler_wait import WaitingLine, wait_for
from replicator.launchpad_bridge.trajectories.row_checks import (
    OnNonfinite,
    RowChecks,
    counts_refused,
)
from replicator.launchpad_bridge.trajectories.rows import RowMemory
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    Cut,
    TableTimeoutError,
    Taken,
)

WhenFull = Literal["block", "drop_oldest", "drop_newest"]
_REASONS = ("full_oldest", "full_newest", "too_old", "too_new")  # for dropping


class TrajectoryQueue:
    """A `Table` that gives each trajectory out once, the oldest first.

    A node of a program: `lp.CourierNode(lp.TrajectoryQueue, capacity=64)`.

    >>> queue = TrajectoryQueue(capacity=64, when_full="drop_oldest")
    >>> reward = np.zeros((2, 20), np.float32)  # two trajectories of 20 steps
    >>> queue.insert({"reward": reward}, actor="actor/0", version=3)
    ActorTurn(number=None, version=None, snapshot=None, rows_per_turn=None)
    >>> queue.take(2, timeout_s=1).versions
    array([3, 3])
    """

    # Of its server: inserts that wait for room must leave a thread for `take`.
    thread_pool_size = 1024

    def __init__(
        self,
        capacity: int,
        *,
        when_full: WhenFull = "block",
        like: PyTree = None,
        finite: Sequence[str] | None = None,
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        """Make an empty queue.

        Args:
          capacity: Number of trajectories that it holds. Where inserts block, at
            least a batch and an insert together.
          when_full: `"block"` lets an insert wait for room, within the deadline of its
            call; `"drop_oldest"` drops those that wait longest; `"drop_newest"` drops
            inserted ones that have no room.
          like: One trajectory, leaves without the first axis, as arrays or
            `jax.ShapeDtypeStruct`s; by default the first that is inserted.
          finite: Names of leaves that must be finite; a name covers all below it.
            By default `reward`; `observation` and `next_observation` where they are.
          on_nonfinite: `"skip"` drops a trajectory with NaN or infinity in them,
            `"keep"` only counts it, `"raise"` raises at its actor.

        Raises:
          ArgumentError: An argument breaks its rule.
        """
        check_count("capacity", capacity)
        check_word("when_full", when_full, ("block", "drop_oldest", "drop_newest"))
        self._checks = RowChecks(capacity, like, finite, on_nonfinite)
        self._capacity = int(capacity)
        self._when_full: WhenFull = when_full
        self._drops_nonfinite = on_nonfinite == "skip"
        # Guards all below; both conditions share it. Contents of rows are copied
        # without it: a row is in `_free`, in `_waiting`, or owned by one thread.
        lock = threading.Lock()
        self._has_room = threading.Condition(lock)
        self._has_rows = threading.Condition(lock)
        self._free = list(range(capacity))
        self._waiting: collections.deque[_Row] = collections.deque()
        self._line = WaitingLine(self._has_room)  # inserts that wait for room
        self._episodes: collections.deque[float] = collections.deque(
            maxlen=arguments.MOST_EPISODES
        )
        self._counts = {"inserted": 0, "taken": 0, "episodes": 0}
        self._dropped: dict[str, int] = dict.fromkeys(_REASONS, 0)
        self._largest_take = 1  # the batch size, as far as it is known

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
        """Take in trajectories, all or none but for dropped ones; see `Table.insert`.

        `number` and `snapshot` are not used: actors take no turns.

        Raises:
          ArgumentError: They are too many for `capacity`, beside a batch as large as
            the largest so far. The first `take` raises it in inserts that wait, too.
        """
        memory, leaves = self._checks.check(
            trajectories, actor=actor, fits=self._check_insert
        )
        given, returns = len(leaves[0]), [float(each) for each in episodes]
        if self._drops_nonfinite:
            returns = [each for each in returns if np.isfinite(each)]
        with self._has_room:
            slots = self._reserve(given, actor)
            self._dropped["full_newest"] += given - len(slots)
        if slots:
            memory.write(np.array(slots), [leaf[: len(slots)] for leaf in leaves])
        with self._has_rows:
            self._waiting.extend(_Row(slot, int(version), memory) for slot in slots)
            self._counts["inserted"] += len(slots)
            self._counts["episodes"] += len(returns)
            self._episodes.extend(returns)
            self._has_rows.notify_all()
        return ActorTurn()

    @arguments.TURN
    def turn(self, actor: str) -> ActorTurn:
        """Return a turn without number and version: actors take none."""
        return ActorTurn()

    @arguments.TAKE
    def take(
        self,
        count: int,
        *,
        oldest: int | None = None,
        newest: int | None = None,
        timeout_s: float,
    ) -> Taken | None:
        """Take out the trajectories that wait longest; see `Table.take`."""
        arguments.check_batch_fits(count, self._capacity)
        with self._has_rows:
            if count > self._largest_take:
                self._largest_take = count
                self._has_room.notify_all()  # inserts that can never fit must raise
            if not wait_for(
                self._has_rows,
                lambda: self._has_enough(count, oldest, newest),
                timeout_s=timeout_s,
            ):
                return None
            rows = [self._waiting.popleft() for _ in range(count)]
            self._counts["taken"] += int(count)  # with those that wait they add up
            episodes = list(self._episodes)
            self._episodes.clear()
        slots = [row.slot for row in rows]
        try:
            trajectories = rows[0].memory.read(np.array(slots))
        finally:
            with self._has_room:
                self._free += slots
                self._has_room.notify_all()
        versions = np.array([row.version for row in rows], np.int64)
        return Taken(trajectories=trajectories, versions=versions, episodes=episodes)

    @arguments.BEGIN
    def begin(self, cut: Cut | None) -> None:
        """Do nothing: the queue keeps its trajectories, wherever the learner is."""

    @arguments.STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of trajectories, and of what happened to inserts.

        `inserted` = `taken` + `waiting` + `dropped["full_oldest"]` +
        `dropped["too_old"]` + `dropped["too_new"]`. Trajectories dropped as
        `"full_newest"` or `"nonfinite"` were not inserted. `nonfinite` counts kept and
        dropped trajectories, `refused` inserts, by actor; `blocked_s` is the time that
        inserts waited for room.
        """
        checks = self._checks.statistics()
        with self._has_rows:
            skipped = checks["nonfinite"] if self._drops_nonfinite else 0
            return {
                **self._counts,
                "waiting": len(self._waiting),
                "capacity": self._capacity,
                "blocked": len(self._line),
                "blocked_s": self._line.waited_s,
                "dropped": {**self._dropped, "nonfinite": skipped},
                **checks,
            }

    def _reserve(self, count: int, actor: str) -> list[int]:
        """Return rows for an insert, fewer where the newest are dropped."""
        if count == 0:  # all of them were skipped
            return []
        if self._when_full == "drop_newest":
            count = min(count, len(self._free))
        elif len(self._free) < count or self._line:
            self._wait_for_room(count, actor)
        while len(self._free) < count:  # they are there, or it is a queue that drops
            self._free.append(self._waiting.popleft().slot)
            self._dropped["full_oldest"] += 1
        return [self._free.pop() for _ in range(count)]

    def _wait_for_room(self, count: int, actor: str) -> None:
        has_room, waited_s = self._line.wait(
            lambda is_first: (
                count > self._most_inserted() or (is_first and self._room() >= count)
            )
        )
        self._check_room_for(count)
        if not has_room:
            raise TableTimeoutError(
                f"`insert` of {actor} waited {waited_s:.3g} s for room for {count} "
                f"trajectories: {len(self._waiting)} of {self._capacity} wait to be "
                'taken. Insert them again, or use `when_full="drop_oldest"`.'
            )

    def _room(self) -> int:
        """Return the number of rows that an insert may have now."""
        if self._when_full == "block":
            return len(self._free)
        return len(self._free) + len(self._waiting)  # all but those being copied

    def _has_enough(self, count: int, oldest: int | None, newest: int | None) -> bool:
        if len(self._waiting) < count:
            return False
        if oldest is not None:
            self._drop("too_old", lambda version: version < oldest)
        if newest is not None:
            self._drop("too_new", lambda version: version > newest)
        return len(self._waiting) >= count

    def _drop(self, reason: str, is_dropped: Callable[[int], bool]) -> None:
        gone = [row.slot for row in self._waiting if is_dropped(row.version)]
        if gone:
            self._waiting = collections.deque(
                row for row in self._waiting if not is_dropped(row.version)
            )
            self._dropped[reason] += len(gone)
            self._free += gone
            self._has_room.notify_all()

    def _most_inserted(self) -> int:
        """Return the number of trajectories that an insert may have.

        A blocked insert of n leaves up to n - 1 rows free. If the other rows are less
        than a batch, it and the learner wait for each other forever.
        """
        beside = self._largest_take - 1 if self._when_full == "block" else 0
        return self._capacity - beside

    def _check_insert(self, count: int) -> None:
        with self._has_room:
            self._check_room_for(count)

    def _check_room_for(self, count: int) -> None:
        if count > self._most_inserted():
            needed = count + self._capacity - self._most_inserted()
            raise ArgumentError(
                f"`capacity` must be at least {needed}, for samples of "
                f"{self._largest_take} (`batch_size` x `samples_per_call`) and inserts "
                f"of {count}, got {self._capacity}. Use {self._largest_take + count}, "
                "or insert fewer at once."
            )


class _Row(NamedTuple):
    slot: int
    version: int
    memory: RowMemory
