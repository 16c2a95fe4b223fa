"""A table whose rows stay after they were drawn, for learners off policy.

    insert ── check ── wait for the limiter ── reserve places ── copy ── publish
                                   │ none free: the remover's choice goes
    take ── wait for rows and limiter ── draw, with replacement ── copy ──▶ batch, keys
                                   │ drawn max_times_sampled times: it goes
    update_priorities(keys) ───────┘ of rows that went: counted, not applied

Memory for all rows is there from the first insert on; rows are copied into it, and out
of it, without the lock.
"""

import collections
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicator.base.host.paths import checked_path
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, check_count, check_positive
from replicator.launchpad_bridge.replay.admission import Admission
from replicator.launchpad_bridge.replay.arguments import (
    INSERT,
    UPDATE_PRIORITIES,
    check_count_of,
    check_options,
    checked_priorities,
    checked_updates,
)
from replicator.launchpad_bridge.replay.held_rows import (
    HeldRows,
    SavedRows,
    any_first_key,
)
from replicator.launchpad_bridge.replay.rate_limiter import (
    LimitedCounts,
    RateLimiter,
)
from replicator.launchpad_bridge.replay.removers import RemoverName
from replicator.launchpad_bridge.replay.restoring import restore
from replicator.launchpad_bridge.replay.row_copies import RowCopies
from replicator.launchpad_bridge.replay.samplers import ReplaySampler, uniform
from replicator.launchpad_bridge.replay.saved_values import check_savable
from replicator.launchpad_bridge.replay.table_saves import (
    TableSaves,
    save_in_background,
)
from replicator.launchpad_bridge.trajectories import arguments
from replicator.launchpad_bridge.trajectories.row_checks import (
    OnNonfinite,
    RowChecks,
    counts_refused,
)
from replicator.launchpad_bridge.trajectories.table import ActorTurn, Cut, Taken

_UNIFORM, _UNLIMITED = uniform(), RateLimiter(min_size=1)


class ReplayTable:
    """A `Table` that keeps its rows, and gives samples of them, with keys.

    A row is one item: a transition, a sequence. A node of a program:
    `lp.CourierNode(lp.ReplayTable, capacity=1_000_000, sampler=lp.prioritised())`.

    >>> table = ReplayTable(1_000)
    >>> reward = np.zeros((2, 20), np.float32)
    >>> table.insert({"reward": reward}, actor="actor/0", version=3, priorities=[1, 4])
    ActorTurn(number=None, version=None, snapshot=None, rows_per_turn=None)
    >>> taken = table.take(4, timeout_s=1)
    >>> taken.probabilities
    array([0.5, 0.5, 0.5, 0.5])
    >>> table.update_priorities(taken.keys, np.ones(4))
    """

    # Of its server: inserts that wait for the learner must leave a thread for `take`.
    thread_pool_size = 1024

    def __init__(
        self,
        capacity: int,
        *,
        sampler: ReplaySampler = _UNIFORM,
        remover: RemoverName = "oldest",
        limiter: RateLimiter = _UNLIMITED,
        max_times_sampled: int | None = None,
        like: PyTree = None,
        finite: Sequence[str] | None = None,
        on_nonfinite: OnNonfinite = "skip",
        seed: int = 0,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every_s: float = 60.0,
    ) -> None:
        """Make an empty table.

        Args:
          capacity: Number of rows that it holds; at least a batch, and an insert.
          sampler: Which rows are drawn: `lp.uniform()` by default,
            `lp.prioritised(exponent)`, `lp.fifo()`, `lp.lifo()`.
          remover: Which row goes where one is inserted into a full table: the
            `"oldest"`, or that of the `"lowest"` priority.
          limiter: Rows that are drawn for each that is inserted; by default any number,
            once there is one row.
          max_times_sampled: How often a row may be drawn; then it goes. None for any
            number.
          like: One row, leaves without the first axis, as arrays or
            `jax.ShapeDtypeStruct`s; by default the first that is inserted.
          finite: Names of leaves that must be finite; a name covers all below it.
            By default `reward`; `observation` and `next_observation` where they are.
          on_nonfinite: `"skip"` drops a row with NaN or infinity in them, `"keep"` only
            counts it, `"raise"` raises at its actor.
          seed: Seed of the draws.
          checkpoint_dir: Directory of its own, where rows, keys, priorities and counts
            are saved, and from which it goes on; None for nowhere.
          checkpoint_every_s: Seconds between two saves.

        Raises:
          ArgumentError: An argument breaks its rule.
          CheckpointError: A saved file is not as it was written.
          CheckpointInUseError: Another table writes to `checkpoint_dir`.
          CheckpointMismatchError: `checkpoint_dir` is of something else, or its rows
            are of another form than `like`.
        """
        check_options(capacity, sampler, remover, limiter, max_times_sampled)
        check_count("seed", seed, "Use 0.", least=0)
        check_positive("checkpoint_every_s", checkpoint_every_s, "Use 60.")
        folder = checked_path("checkpoint_dir", checkpoint_dir)
        self._capacity = capacity = int(capacity)  # NumPy's have no `bit_length`
        self._checks = RowChecks(capacity, like, finite, on_nonfinite)
        self._limited = LimitedCounts(limiter)
        self._drops_nonfinite = on_nonfinite == "skip"
        self._rows = HeldRows(
            capacity,
            sampler=sampler,
            remover=remover,
            max_times_sampled=max_times_sampled,
            first_key=any_first_key(),
        )
        # Its lock guards all records here. The lock of `_checks` is never held together
        # with it. Contents of rows are copied without either: an insert owns the places
        # that it reserved, once nobody reads them.
        self._admission = Admission(self._rows, self._limited)
        self._copies = RowCopies(
            self._admission.may_insert, self._rows, self._saved_counts
        )
        self._random = np.random.default_rng(seed)
        self._episodes: collections.deque[float] = collections.deque(
            maxlen=arguments.MOST_EPISODES
        )
        self._counts = {"episodes": 0, "updated": 0, "late": 0}
        self._dropped = {"full": 0, "used_up": 0}
        self._saves: TableSaves | None = None
        if folder is not None:
            self._saves = TableSaves(folder)
            try:
                self._go_on_from(self._saves)
            except BaseException:
                self._saves.close()
                raise
            self._rows.save_from_now_on()
            save_in_background(self, self._saves, every_s=checkpoint_every_s)

    @counts_refused
    @INSERT
    def insert(
        self,
        trajectories: PyTree,
        *,
        actor: str,
        version: int,
        number: int | None = None,
        snapshot: bytes | None = None,
        episodes: Sequence[float] = (),
        priorities: Sequence[float] | np.ndarray | None = None,
    ) -> ActorTurn:
        """Take in rows, all or none but for skipped ones; see `Table.insert`.

        `number` and `snapshot` are not used: actors take no turns. `priorities` has one
        for each row, finite and at least 0; by default it is the largest that any row
        was given so far, 1 in a new table.

        Raises:
          TrajectoryError: A priority breaks its rule; or rows have another form than
            those in `checkpoint_dir`, or are of a class that it cannot hold.
          ArgumentError: They are too many for `capacity`, or for the limiter, beside
            batches as large as the largest so far.
        """
        beside = checked_priorities(priorities, actor)
        if self._saves is not None and self._copies.memory is None:  # the first ones
            check_savable(trajectories, actor)
        memory, leaves = self._checks.check(
            trajectories,
            actor=actor,
            fits=lambda count: self._check_insert(count, beside, actor),
            beside=beside,
        )
        given = leaves.pop() if beside else None
        returns = [float(each) for each in episodes]
        if self._drops_nonfinite:
            returns = [each for each in returns if np.isfinite(each)]
        count = len(leaves[0])
        with self._admission.may_insert:
            self._admission.wait_to_insert(count, actor)
            slots, removed = self._rows.reserve(count)
            self._dropped["full"] += removed
            self._limited.writing += count
            self._copies.wait_for_readers(slots)
        try:
            memory.write(slots, leaves)
        except BaseException:  # no memory for a copy
            with self._admission.may_insert:
                self._rows.release(slots)
                self._limited.writing -= count
            raise
        with self._admission.may_take:
            self._copies.memory = memory
            self._limited.writing -= count
            self._rows.publish(slots, int(version), given)
            self._limited.inserted += count
            self._counts["episodes"] += len(returns)
            self._episodes.extend(returns)
            self._admission.may_take.notify_all()
            self._admission.may_insert.notify_all()  # there may be rows to remove now
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
        """Draw rows, with replacement; they stay in the table. See `Table.take`.

        Rows below `oldest` are not drawn, and stay; `newest` has no effect.

        Returns:
          Rows with their keys and probabilities; None if none can be drawn in time:
          `statistics()["waits_for"]` then says what was missing.

        Raises:
          ArgumentError: `capacity` is below `count`, or the limiter can never let as
            many pass.
        """
        arguments.check_batch_fits(count, self._capacity)
        with self._admission.may_take:
            self._limited.check_sizes(batch=count)
            if not self._admission.wait_to_take(count, oldest, timeout_s):
                return None
            drawn = self._rows.draw(count, self._random)
            self._limited.taken += int(count)
            self._dropped["used_up"] += len(drawn.used_up)
            episodes = list(self._episodes)
            self._episodes.clear()
            self._admission.may_insert.notify_all()
            try:
                with self._copies.reading(drawn.slots):
                    trajectories = self._copies.copy(drawn.slots)
            finally:
                self._rows.release(drawn.used_up)
        return Taken(
            trajectories=trajectories,
            versions=drawn.versions,
            episodes=episodes,
            keys=drawn.keys,
            probabilities=drawn.probabilities,
        )

    @UPDATE_PRIORITIES
    def update_priorities(
        self, keys: np.ndarray, values: Sequence[float] | np.ndarray
    ) -> None:
        """Give rows other priorities; those of rows that went are counted as `late`.

        Args:
          keys: int64 [n], of `Taken.keys`; of one key twice the last counts.
          values: One for each, finite and at least 0; the sampler's exponent is not yet
            applied.

        Raises:
          ArgumentError: A value breaks its rule, or a key has this table's own prefix,
            and it never gave it. One of another table, as before a restart, is late.
        """
        keys, values = checked_updates(keys, values)
        with self._admission.may_take:
            is_given = self._rows.was_given(keys)
            if not is_given.all():
                raise ArgumentError(
                    "`keys` must be keys that this table gave, got "
                    f"{keys[~is_given][0]}. Pass `Taken.keys`."
                )
            late = self._rows.update(keys, values)
            self._counts["updated"] += len(keys) - late
            self._counts["late"] += late
            self._admission.may_take.notify_all()  # all priorities may have been 0

    @arguments.BEGIN
    def begin(self, cut: Cut | None) -> None:
        """Do nothing: the table keeps its rows, wherever the learner is."""

    @arguments.STATISTICS
    def save(self) -> None:
        """Save now; return once all that was inserted before is on the disk.

        Raises:
          ArgumentError: The table has no `checkpoint_dir`.
          OSError: It cannot be written; the save before stays.
        """
        if self._saves is None:
            raise ArgumentError(
                "`checkpoint_dir` must be a directory for `save`, got None. Give the "
                "table one."
            )
        self._saves.save(self._copies)

    @arguments.STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of rows, and of what happened to inserts, samples and updates.

        `inserted` = `held` + `dropped["full"]` + `dropped["used_up"]`; `taken` counts
        rows drawn, `updated` priorities that were set, `late` those of rows that went,
        `too_old` rows that are held and below the last `oldest`. `nonfinite` counts
        kept and skipped rows, `refused` inserts, by actor; `blocked_s` and `waited_s`
        are the seconds that inserts and samples waited. `waits_for` is a text: what the
        last sample that could not be drawn waited for; None after one that was.
        """
        checks = self._checks.statistics()
        with self._admission.may_take:
            skipped = checks["nonfinite"] if self._drops_nonfinite else 0
            return {
                "inserted": self._limited.inserted,
                "taken": self._limited.taken,
                **self._counts,
                "held": self._rows.held,
                "too_old": self._rows.too_old,
                "capacity": self._capacity,
                "blocked": len(self._admission.line),
                "blocked_s": self._admission.line.waited_s,
                "waited_s": self._admission.waited_s,
                "waits_for": self._admission.waits_for,
                "dropped": {**self._dropped, "nonfinite": skipped},
                **checks,
            }

    def _go_on_from(self, saves: TableSaves) -> None:
        """Take in the rows, and the counts, of the last save."""

        def insert(saved: SavedRows) -> np.ndarray:
            slots, removed = restore(saved, self._checks, self._rows, self._copies)
            self._dropped["full"] += removed
            return slots

        counts = saves.load(insert)
        if counts is not None:
            self._checks.saved_in = saves.directory
            self._rows.largest = counts["largest"]
            self._counts |= counts["counts"]
            for reason, removed in counts["dropped"].items():
                self._dropped[reason] += removed
            self._limited.begin_with(
                inserted=counts["inserted"],
                taken=counts["taken"],
                start=counts.get("start", 0.0),  # older ones have none
                held=self._rows.held,
            )

    def _saved_counts(self) -> dict[str, Any]:
        return {
            "inserted": self._limited.inserted,
            "taken": self._limited.taken,
            "start": self._limited.start,
            "held": self._rows.held,
            "largest": self._rows.largest,
            "counts": dict(self._counts),
            "dropped": dict(self._dropped),
        }

    def _check_insert(
        self, count: int, priorities: Sequence[np.ndarray], actor: str
    ) -> None:
        check_count_of(priorities, count, actor)
        if count > self._capacity:
            raise ArgumentError(
                f"`capacity` must be at least {count}, for inserts of {count}, got "
                f"{self._capacity}. Use {4 * count}, or insert fewer at once."
            )
        with self._admission.may_insert:
            self._limited.check_sizes(insert=count)
