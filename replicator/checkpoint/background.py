"""Write one draft at a time on a thread; count what fails, and say when it is hopeless.

A disk that is full for an hour must not end a run of a week: a failed save is a warning
and a number, until so many in a row have failed that nobody would want to go on.
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
    """What became of the saves that were asked for since the store was opened.

    Attributes:
      saved: Committed.
      failed: Refused by the disk.
      skipped: Not begun, as the one before was still being written.
      failed_in_a_row: Failed since the last one that was committed.
      last_step: What was committed last.
      last_save_s: How long that took, in the background.
    """

    saved: int = 0
    failed: int = 0
    skipped: int = 0
    failed_in_a_row: int = 0
    last_step: int | None = None
    last_save_s: float | None = None


class BackgroundSaver:
    """Hands drafts to `write` on a thread of its own.

    Args:
      write: Commits a draft, or raises.
      clock: Where times come from.
      timeout_s: The longest that `wait` waits.
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
        # No daemon: Python joins it at exit, so a save that has begun ends.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicator-checkpoint")
        self._in_flight: Future[None] | None = None
        self._last: Future[None] | None = None  # what came after a save
        self._began_s = 0.0
        # Of `_counts`: the thread counts what it saved, its caller what it skipped.
        # Held for no other lock, and never while anything is written or waited for.
        self._guard = threading.Lock()
        self._counts = SaveCounts()
        # Each is written by the thread alone, whole.
        self._failure: Exception | None = None
        self._fenced: CheckpointInUseError | None = None

    @property
    def counts(self) -> SaveCounts:
        """What became of the saves so far; replaced whole, so it is read as it is."""
        return self._counts

    def is_busy(self) -> bool:
        """Tell whether a save runs."""
        return self._in_flight is not None and not self._in_flight.done()

    def skip(self, step: int) -> None:
        """Count that a step is not saved, as another is being saved.

        It is a warning where much could be lost; steps of a millisecond, asked to be
        saved every hundredth, overtake any save, and lose a fraction of a second.
        """
        self._count("skipped")
        runs_s = self._clock.now_s() - self._began_s
        _log.log(
            logging.WARNING if runs_s >= _LONG_S else logging.DEBUG,
            "Step %d is not saved: the save before it has run for %.3g s. Save less "
            "often, or to a faster place.",
            step,
            runs_s,
        )

    def run_after(self, action: Callable[[], None]) -> None:
        """Run what raises nothing, on the thread that saves, once no save runs."""
        self._last = self._thread.submit(action)

    def start(self, draft: Draft) -> None:
        """Begin to write."""
        self._began_s = self._clock.now_s()
        self._in_flight = self._thread.submit(self._save, draft)

    def wait(self) -> None:
        """Return when no save runs, however it ended.

        Raises:
          TimeoutError: It took longer than `timeout_s`.
        """
        begun = [each for each in (self._in_flight, self._last) if each is not None]
        if wait(begun, timeout=self._timeout_s).not_done:
            raise TimeoutError(
                f"A save must end within {self._timeout_s:g} s, got no answer from the "
                "disk. Save to a faster place, or raise `timeout_s`."
            )
        if self._in_flight is not None:
            self._in_flight.result()

    def close(self) -> None:
        """Wait for the save that runs, and end the thread.

        Raises:
          TimeoutError: It took longer than `timeout_s`.
        """
        self.wait()
        self._thread.shutdown()

    def raise_if_failed(self, *, in_a_row: int) -> None:
        """Return if not so many saves, and the last, have failed.

        Raises:
          CheckpointError: They have.
          CheckpointInUseError: A newer run has taken the directory.
        """
        if self._fenced is not None:
            raise self._fenced
        failed = self._counts.failed_in_a_row
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
            # Raised by whoever asks for the outcome; until then training goes on.
            self._failure = failure
            # After the failure itself: who sees the count reads that next.
            self._count("failed")
            _log.warning(
                "Step %d could not be saved, training goes on: %r", draft.step, failure
            )
        else:
            took_s = self._clock.now_s() - started_s
            self._count("saved", last_step=draft.step, last_save_s=took_s)

    def _count(self, what: Literal["saved", "failed", "skipped"], **more: Any) -> None:
        with self._guard:
            before = self._counts
            more[what] = getattr(before, what) + 1
            if what != "skipped":
                failed = before.failed_in_a_row + 1
                more["failed_in_a_row"] = failed if what == "failed" else 0
            self._counts = dataclasses.replace(before, **more)
