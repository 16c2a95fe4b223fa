"""A replay table whose actors take turns: the same samples in each run, over kills.

    insert ── TrajectoryTurns ── new_rows_per_batch rows for each batch ──▶ ring
    update_priorities ── wait for their place ───────────────────────────▶ ring
    take of batch b ── rows are in ── priorities of b - priority_lag are in
        ── write both to the journal ── draw with (seed, b) ──▶ sample, cut

W batches of new rows come in before the learner's batch 0, as many as `min_size` needs;
after that one before each. Those before batch b are acted with version b - lag.

A table that was started again, and one whose learner went back to its checkpoint, do
the same in `begin`: the journal leads to the state behind the last batch of the cut.
"""

import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from replicator import rpc
from replicator.base.host.paths import checked_path
from replicator.base.types import PyTree
from replicator.errors import ArgumentError
from replicator.launchpad_bridge.replay.arguments import (
    UPDATE_PRIORITIES,
    paired_updates,
)
from replicator.launchpad_bridge.replay.samplers import ReplaySampler, uniform
from replicator.launchpad_bridge.replay.saved_values import check_savable
from replicator.launchpad_bridge.replay.turns.journaled_draws import JournaledDraws
from replicator.launchpad_bridge.replay.turns.sample_order import SampleOrder
from replicator.launchpad_bridge.replay.turns.turn_journal import TurnJournal
from replicator.launchpad_bridge.running import node_context
from replicator.launchpad_bridge.trajectories import arguments
from replicator.launchpad_bridge.trajectories.handler_wait import wait_for
from replicator.launchpad_bridge.trajectories.row_checks import (
    RowChecks,
    check_form,
    counts_refused,
)
from replicator.launchpad_bridge.trajectories.table import (
    ActorTurn,
    Cut,
    TableRestartedError,
    Taken,
)
from replicator.launchpad_bridge.trajectories.trajectory_turns import TrajectoryTurns

_UNIFORM = uniform()


@dataclasses.dataclass(kw_only=True)
class _Begun:
    """What came since a call of `begin`; another object after the next call."""

    snapshots: dict[str, bytes | None]  # of all actors behind the new rows that are in
    episodes: list[float] = dataclasses.field(default_factory=list)  # of no batch yet


class ReplayTurns:
    """A `Table` that keeps its rows, and gives the same samples of them in each run.

    A node of a program: `lp.CourierNode(lp.ReplayTurns, actors, ...)`; the learner has
    the same `batch_size`, `fixed_lag=lag` and, with priorities, `priority_lag`.

    >>> table = ReplayTurns(
    ...     ["a"],
    ...     batch_size=4,
    ...     new_rows_per_batch=1,
    ...     rows_per_turn=1,
    ...     lag=0,
    ...     capacity=8,
    ...     checkpoint_dir="replay",
    ... )
    >>> table.begin(None)
    >>> rows = {"reward": np.ones((1, 1), np.float32)}
    >>> turn = table.insert(rows, actor="a", version=0, number=0)
    >>> taken = table.take(4, timeout_s=1)
    >>> taken.keys, taken.probabilities, taken.cut.batch
    (array([0, 1, 2, 3]), array([1., 1., 1., 1.]), 1)
    """

    # Of its server: calls that wait must leave threads for those they wait for.
    thread_pool_size = 1024

    def __init__(
        self,
        actors: Sequence[str],
        *,
        batch_size: int,
        new_rows_per_batch: int,
        rows_per_turn: int,
        lag: int,
        capacity: int,
        checkpoint_dir: str | os.PathLike[str],
        min_size: int = 1,
        sampler: ReplaySampler = _UNIFORM,
        priority_lag: int = 4,
        seed: int = 0,
        like: PyTree = None,
        finite: Sequence[str] | None = None,
        on_nonfinite: Literal["keep", "raise"] = "keep",
        snapshot_bytes: int = 1 << 28,
        keep_batches: int = 10_000,
    ) -> None:
        """Make a table, which waits for `begin`.

        Args:
          actors: Names of the actors, in the order of turns.
          batch_size: Number of rows that are drawn for a batch of the learner.
          new_rows_per_batch: Number of rows that are inserted before each batch; a
            multiple of `rows_per_turn`.
          rows_per_turn: Number of rows in each insert.
          lag: Updates that the newest rows of a batch have missed, but in the first.
          capacity: Number of rows that it holds; the oldest goes.
          checkpoint_dir: Directory of its own, where rows and priorities are written as
            they come, and from which it goes on where the learner's checkpoint is.
          min_size: Number of rows that must be there before the first batch.
          sampler: `lp.uniform()` by default, or `lp.prioritised(exponent)`.
          priority_lag: Number of batches after which priorities are applied, at least
            1: a batch waits for those of so many before it.
          seed: Seed of the draws.
          like: See `ReplayTable`.
          finite: See `ReplayTable`.
          on_nonfinite: See `TrajectoryTurns`.
          snapshot_bytes: See `TrajectoryTurns`.
          keep_batches: Batches that a learner may go back: their rows stay on the disk.

        Raises:
          ArgumentError: An argument breaks its rule.
          CheckpointInUseError: Another table writes to `checkpoint_dir`.
          CheckpointMismatchError: `checkpoint_dir` is of something else.
        """
        self._order = SampleOrder(
            actors=actors,
            batch_size=batch_size,
            new_rows_per_batch=new_rows_per_batch,
            rows_per_turn=rows_per_turn,
            lag=lag,
            capacity=capacity,
            min_size=min_size,
            sampler=sampler,
            priority_lag=priority_lag,
            seed=seed,
        )
        if (folder := checked_path("checkpoint_dir", checkpoint_dir)) is None:
            raise ArgumentError(
                "`checkpoint_dir` must be a directory, got None. Give the table one."
            )
        self._turns = TrajectoryTurns(
            actors,
            batch_size=new_rows_per_batch,
            rows_per_turn=rows_per_turn,
            lag=self._order.insertion_lag,
            like=like,
            finite=finite,
            on_nonfinite=on_nonfinite,
            snapshot_bytes=snapshot_bytes,
            batches_ahead=lag + 2,
        )
        self._checks = RowChecks(1, None, (), "keep")  # of `refused` alone
        # Guards all below, and is held while parts are written and rows copied, so
        # `begin` may come at any moment. The lock of `_turns` is taken under it;
        # `_turns` calls nothing here.
        self._changed = threading.Condition()
        self._begun: _Begun | None = None  # None until `begin`
        self._waits_for: str | None = None
        self._folder = folder
        journal = TurnJournal(folder, capacity=capacity, keep_batches=keep_batches)
        self._rows = JournaledDraws(self._order, journal)
        self._close_journal = weakref.finalize(self, journal.close)
        if (context := node_context.current()) is not None:
            context.when_over(self._close)

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
        """Take in a turn; return the next one; see `TrajectoryTurns.insert`.

        Raises:
          TrajectoryError: Rows have another form than those in `checkpoint_dir`, or are
            of a class that it cannot hold; or see there.
          TableTimeoutError: See there.
          ArgumentError: See there.
        """
        if (form := self._rows.form) is None:
            check_savable(trajectories, actor)
        else:
            check_form(form, trajectories, actor, self._folder)
        return self._turns.insert(
            trajectories,
            actor=actor,
            version=version,
            number=number,
            snapshot=snapshot,
            episodes=episodes,
        )

    @arguments.TURN
    def turn(self, actor: str) -> ActorTurn:
        """Return the next turn of an actor; see `TrajectoryTurns.turn`.

        Raises:
          TableTimeoutError: No learner has called `begin` within the deadline.
          ArgumentError: The actor is not one of those given.
        """
        return self._turns.turn(actor)

    @arguments.TAKE
    def take(
        self,
        count: int,
        *,
        oldest: int | None = None,
        newest: int | None = None,
        timeout_s: float,
    ) -> Taken | None:
        """Draw the next batch, with replacement; see `Table.take`.

        `count` must be `batch_size`. `oldest` and `newest` have no effect: versions
        follow from numbers, and all rows are drawn.

        Returns:
          Rows with keys and probabilities, and the cut behind them; None if new rows,
          or priorities, did not come in time: `statistics()["waits_for"]` says which.
        """
        arguments.check_same_batch(count, self._order.batch_size)
        until_s = time.monotonic() + timeout_s
        with self._changed:
            begun = self._check_begun()
            missing = self._order.first_batches + self._rows.draws.batch
            missing -= self._rows.batches_in
        for _ in range(missing):
            # Without the lock: `begin` may come while this waits.
            left_s = max(until_s - time.monotonic(), 0.0)
            new = self._turns.take(self._order.new_rows_per_batch, timeout_s=left_s)
            if not self._append(begun, new):
                return None
        with self._changed:
            draws = self._rows.draws
            is_ready = wait_for(
                self._changed,
                lambda: self._begun is not begun or draws.awaited is None,
                timeout_s=max(until_s - time.monotonic(), 0.0),
            )
            self._check_same(begun)
            awaited = f"the priorities of batch {draws.awaited}"
            self._waits_for = None if is_ready else awaited
            return self._draw(begun) if is_ready else None

    @UPDATE_PRIORITIES
    def update_priorities(
        self, keys: np.ndarray, values: Sequence[float] | np.ndarray
    ) -> None:
        """Keep priorities until they are applied, at the place of their batch.

        The same again, and those that were applied already, change nothing.

        Args:
          keys: int64 [n], of `Taken.keys`.
          values: One for each, at least 0; NaN for a row that keeps the one it has.

        Raises:
          ArgumentError: A value is negative, or the table never gave such a key.
          TableRestartedError: No learner has called `begin` yet.
        """
        keys, values = paired_updates(keys, values)
        if (values < 0).any():
            raise ArgumentError(
                f"`values` must be at least 0, got {values.min()}. Use the absolute "
                "value of the error."
            )
        with self._changed:
            self._check_begun()
            self._rows.draws.receive(keys, values)
            self._changed.notify_all()

    @arguments.BEGIN
    def begin(self, cut: Cut | None) -> None:
        """Go on behind the last batch of a cut; None begins anew, without rows.

        Raises:
          ArgumentError: The cut is of another table, or of a batch that
            `checkpoint_dir` has not.
          TrajectoryError: A snapshot has more than its share of `snapshot_bytes`.
        """
        with self._changed:
            if rpc.cancelled():  # it waited here: its learner called again, or went on
                return
            self._begun = None
            if cut is None or cut.batch == 0:
                self._rows.begin_anew()
                inner = Cut(batch=0, snapshots=dict.fromkeys(self._order.actors))
            else:
                self._order.check_cut(cut)
                self._rows.go_back(cut)
                inner = Cut(batch=self._rows.batches_in, snapshots=cut.snapshots)
            self._turns.begin(inner)
            self._begun = _Begun(snapshots=dict(inner.snapshots))
            self._changed.notify_all()

    @arguments.STATISTICS
    def statistics(self) -> dict[str, Any]:
        """Return counts of rows, batches and priorities of the run so far.

        `inserted` = `held` + `dropped["full"]`, rows in the order of turns; `taken`
        counts rows drawn, `updated` priorities that were applied, `late` those of rows
        that went; `waits_for` is what the last call of `take` waited for, or None.
        `turns` has the counts of `TrajectoryTurns`, since this process started.
        """
        turns = self._turns.statistics()
        with self._changed:
            draws = self._rows.draws
            inserted, held = draws.ring.inserted, draws.ring.held
            return {
                "inserted": inserted,
                "held": held,
                "capacity": self._order.capacity,
                "taken": draws.batch * self._order.batch_size,
                **draws.counts,
                "waits_for": self._waits_for,
                "dropped": {"full": inserted - held},
                **self._checks.statistics(),
                "nonfinite": turns["nonfinite"],
                "turns": turns,
            }

    def _close(self) -> None:
        """Answer no more; let another table have the directory."""
        with self._changed:
            self._begun = None
            self._close_journal()
            self._changed.notify_all()

    def _append(self, begun: _Begun, new: Taken | None) -> bool:
        """Insert a batch of new rows; return whether there was one."""
        with self._changed:
            self._check_same(begun)
            if new is None or new.cut is None:
                self._waits_for = self._turns.statistics()["waiting_for"]
                return False
            if new.cut.batch != self._rows.batches_in + 1:
                self._begun = None  # another call has the batch before
                self._check_same(begun)
            self._rows.append(new.trajectories)
            begun.snapshots = dict(new.cut.snapshots)
            begun.episodes += new.episodes
            return True

    def _draw(self, begun: _Begun) -> Taken:
        rows, sample = self._rows.draw()
        episodes, begun.episodes = begun.episodes, []
        return Taken(
            trajectories=rows,
            versions=self._order.versions(sample.serials),
            episodes=episodes,
            cut=Cut(
                batch=self._rows.draws.batch,
                snapshots=begun.snapshots,
                order={**self._order.to_json(), "journal": self._rows.journal_id},
            ),
            keys=sample.keys,
            probabilities=sample.probabilities,
        )

    def _check_begun(self) -> _Begun:
        if self._begun is None:
            raise TableRestartedError(
                "`begin` must be called first, got no call. Pass the last batch's cut."
            )
        return self._begun

    def _check_same(self, begun: _Begun) -> None:
        if self._begun is not begun:
            raise TableRestartedError(
                "`begin` was called by another learner while this call waited. Call "
                "`begin` again if this is the only learner."
            )
