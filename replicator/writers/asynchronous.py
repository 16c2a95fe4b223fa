"""Write on another thread, so that a slow disk does not hold up the devices.

Rows wait in a bounded queue in the order written. What the inner writer raises there is
raised here by the next call.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from replicator.errors import check_count, check_number
from replicator.writers.writer import Writer, check_writer


class Async:
    """Hand rows to `writer` on a thread of its own.

    Args:
      writer: The one who writes.
      capacity: Rows that may wait; `write` waits while so many do.
      timeout_s: The longest that a call waits for `writer`.

    Raises:
      ArgumentError: An argument is of a wrong kind.
    """

    def __init__(
        self, writer: Writer, *, capacity: int = 1024, timeout_s: float = 60.0
    ):
        check_writer("writer", writer)
        check_count("capacity", capacity)
        check_number("timeout_s", timeout_s)
        self._writer = writer
        self._timeout_s = timeout_s
        # Taken by who queues a row, given back by the thread once it is written. Rows
        # in the queue die with the process; a run that goes on writes them again.
        self._room = threading.BoundedSemaphore(capacity)
        # One thread, so in order: when a `flush` has run, so have all rows before it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicator-writer")
        # Written by the thread, taken by who calls next: each is one assignment.
        self._failure: Exception | None = None
        self._closed = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the numbers of one step.

        Raises:
          TimeoutError: The queue stayed full for `timeout_s`.
          Exception: What an earlier row met in the inner writer.
        """
        self._raise_failure()
        if not self._room.acquire(timeout=self._timeout_s):
            raise self._too_slow("take a row")
        self._thread.submit(self._write, step, dict(scalars))

    def flush(self) -> None:
        """Return when all queued rows are written and flushed.

        Raises:
          TimeoutError: That took longer than `timeout_s`.
          Exception: What a row, or flushing, met in the inner writer.
        """
        if not self._closed:
            self._finish(self._writer.flush)
        self._raise_failure()

    def close(self) -> None:
        """Write what is queued, close the inner writer and end the thread.

        Raises:
          TimeoutError: That took longer than `timeout_s`.
          Exception: What a row, or closing, met in the inner writer.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._finish(self._writer.close)
        finally:
            self._thread.shutdown(wait=False)
        self._raise_failure()

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        try:
            self._writer.write(step, scalars)
        except Exception as failure:
            # Raised again by the next call; the first of several tells the cause.
            self._failure = self._failure or failure
        finally:
            self._room.release()

    def _finish(self, call: Callable[[], None]) -> None:
        done = self._thread.submit(call)
        if done not in wait([done], timeout=self._timeout_s).done:
            raise self._too_slow(call.__name__)
        done.result()

    def _too_slow(self, what: str) -> TimeoutError:
        return TimeoutError(
            f"`writer` must {what} within {self._timeout_s:g} s, got no answer from "
            f"{type(self._writer).__name__}. Write to a faster place."
        )

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
