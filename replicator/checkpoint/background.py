"""Write one draft at a time on a thread; count failures, and give up after several.

A disk that is full for an hour must not end a run of a week: a failed save is logged
and counted, until several in a row have failed.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

from replicator.base.host.clock import Clock
from replicator.checkpoint.snapshot import Draft
from replicator.errors import CheckpointError, CheckpointInUseError

_log = logging.getLogger(__name__)

_LONG_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveCounts:
    """Numbers of saves since the store was opened.

    Attributes:
      saved: Number of saves that were committed.
      failed: Number of saves that failed.
      skipped: Number of saves not begun, as the one before was still being written.
      failed_in_a_row: Number of failures since the last commit.
      last_step: Step that was committed last.
      last_save_s: Seconds that it took, in the background.
    """

    saved: int = 0
    failed: int = 0
    skipped: int = 0
    failed_in_a_row: int = 0
    last_step: int | None = None
    last_save_s: float | None = None


class BackgroundSaver:
    """Passes drafts to `write` on a thread of its own.

    Attributes:
      counts: Numbers of saves so far; one reference, so reading needs no lock.

    Args:
      write: Commits a draft, or raises.
      clock: Clock of all times.
      timeout_s: Longest wait of `wait`, in seconds.
    """

    def __init__(
        self,
        write: Callable[[Draft], None],
        *,
        clock: Clock,
        timeout_s: float,
    ):
        self._write = write
        self._clock = clock
        self._timeout_s = timeout_s
        # Not a daemon: Python joins it at exit, so a save that has begun ends. If the
        # process dies in it, the next owner of the directory tidies up (`commit.tidy`).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicator-checkpoint")
        self._in_flight: Future[None] | None = None
        self._began_s = 0.0
        # Guards `counts`, which the thread and its caller both change. Under it no
        # other lock is taken, and nothing is written or waited for.
        self._guard = threading.Lock()
        self.counts = SaveCounts()
        # Written by the thread alone, as whole references; its caller reads them.
        self._failure: Exception | None = None
        self._fenced: CheckpointInUseError | None = None

    def is_busy(self) -> bool:
        """Return whether a save runs."""
        return self._in_flight is not None and not self._in_flight.done()

    def skip(self, step: int) -> None:
        """Count a step that is not saved because another is being saved.

        Logged as a warning if much could be lost; saving every hundredth step of a
        millisecond overtakes any save, and loses only a fraction of a second.
        """
        self._count("skipped")
        runs_s = self._clock.now_s() - self._began_s
        _log.log(
            logging.WARNING if runs_s >= _LONG_S else logging.DEBUG,
            "Step %d is not saved: the save before it has run for %.3g s. Save less "
            "often, or to a faster disk.",
            step,
            runs_s,
        )

    def start(self, draft: Draft) -> None:
        """Begin to write a draft."""
        self._began_s = self._clock.now_s()
        self._in_flight = self._thread.submit(self._save, draft)

    def wait(self) -> None:
        """Wait until no save runs, whether it succeeded or not.

        Raises:
          TimeoutError: It took longer than `timeout_s`.
        """
        if self._in_flight is None:
            return
        if not wait([self._in_flight], timeout=self._timeout_s).done:
            raise TimeoutError(
                f"A save must end within {self._timeout_s:g} s, got no answer from the "
                "disk. Save to a faster one, or raise `timeout_s`."
            )
        self._in_flight.result()

    def close(self) -> None:
        """Wait for the save that runs, and end the thread.

        Raises:
          TimeoutError: It took longer than `timeout_s`.
        """
        self.wait()
        self._thread.shutdown()

    def raise_if_failed(self, *, in_a_row: int) -> None:
        """Raise if the last `in_a_row` saves have all failed.

        Raises:
          CheckpointError: They have.
          CheckpointInUseError: A newer run has taken the directory.
        """
        if self._fenced is not None:
            raise self._fenced
        failed = self.counts.failed_in_a_row
        if failed < in_a_row:
            return
        which = "the last" if in_a_row == 1 else f"the last {failed}"
        raise CheckpointError(
            f"Checkpoints must be writable, got {which} refused: {self._failure!r}. "
            "Make room or repair the disk, then run again: it resumes from the newest."
        ) from self._failure

    def _save(self, draft: Draft) -> None:
        started_s = self._clock.now_s()
        try:
            self._write(draft)
        except CheckpointInUseError as failure:
            self._fenced = failure
            _log.error("%s", failure)
        except Exception as failure:
            # Raised by `raise_if_failed`; until then training goes on.
            self._failure = failure
            # Counted after it is stored: `raise_if_failed` reads the count first.
            self._count("failed")
            _log.warning(
                "Step %d could not be saved, training goes on: %r", draft.step, failure
            )
        else:
            took_s = self._clock.now_s() - started_s
            self._count("saved", last_step=draft.step, last_save_s=took_s)

    def _count(self, what: Literal["saved", "failed", "skipped"], **more: Any) -> None:
        with self._guard:
            before = self.counts
            more[what] = getattr(before, what) + 1
            if what != "skipped":
                failed = before.failed_in_a_row + 1
                more["failed_in_a_row"] = failed if what == "failed" else 0
            self.counts = dataclasses.replace(before, **more)
