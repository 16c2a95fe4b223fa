"""Who may insert into a replay table, and draw from it, now; the others wait.

One lock guards all records of a table; two conditions share it, one for inserts that
wait and one for samples. No other lock is taken under it, and no contents are copied.
"""

import threading
import time

from replicator.launchpad_bridge.replay.held_rows import HeldRows
from replicator.launchpad_bridge.replay.rate_limiter import LimitedCounts
from replicator.launchpad_bridge.trajectories.handler_wait import WaitingLine, wait_for
from replicator.launchpad_bridge.trajectories.table import TableTimeoutError


class Admission:
    """Waits of one table; all methods are called under its lock.

    Attributes:
      may_insert: Condition on which inserts wait; holds the lock.
      may_take: Condition on which samples wait, of the same lock.
      line: Inserts that wait.
      waited_s: Seconds that samples waited.
      waits_for: What the last sample that could not be drawn waited for; None after one
        that was.
    """

    def __init__(self, rows: HeldRows, limited: LimitedCounts) -> None:
        """Take note of the records that the lock guards."""
        lock = threading.Lock()
        self.may_insert = threading.Condition(lock)
        self.may_take = threading.Condition(lock)
        self.line = WaitingLine(self.may_insert)
        self.waited_s = 0.0
        self.waits_for: str | None = None
        self._rows, self._limited = rows, limited

    def wait_to_insert(self, count: int, actor: str) -> None:
        """Return once rows may come in.

        Raises:
          TableTimeoutError: They may not before the call's deadline.
        """
        if not self.line and self._can_insert(count):
            return
        may_insert, waited_s = self.line.wait(
            lambda is_first: is_first and self._can_insert(count)
        )
        if not may_insert:
            raise TableTimeoutError(
                f"`insert` of {actor} waited {waited_s:.3g} s for samples: "
                f"{self._limited}. Insert them again."
            )

    def wait_to_take(self, count: int, oldest: int | None, timeout_s: float) -> bool:
        """Return whether rows, none below `oldest`, can be drawn within the time."""
        if not self._can_take(count, oldest):
            started_s = time.monotonic()
            may_take = wait_for(
                self.may_take,
                lambda: self._can_take(count, oldest),
                timeout_s=timeout_s,
            )
            self.waited_s += time.monotonic() - started_s
            if not may_take:
                # Rows first: where there are none, the limiter has no say.
                self.waits_for = self._rows.missing(count) or str(self._limited)
                return False
        self.waits_for = None
        return True

    def _can_insert(self, count: int) -> bool:
        rows = self._rows
        # A learner that cannot draw a batch of them waits for new rows, so these must
        # not wait for the learner.
        is_stuck = rows.held > 0 and not rows.can_draw(self._limited.batch)
        return rows.room >= count and (
            is_stuck or self._limited.may_insert(count, held=rows.held)
        )

    def _can_take(self, count: int, oldest: int | None) -> bool:
        # The bound is the table's: another sample may have set it since the last look.
        self._rows.draw_from(oldest)
        return self._rows.can_draw(count) and self._limited.may_take(
            count, held=self._rows.held
        )
