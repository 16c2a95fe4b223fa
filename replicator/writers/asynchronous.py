"""Write on another thread, so that a slow disk does not hold up the devices.

Rows wait in a bounded queue in the order written. An error of the inner writer is
raised by the next call.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from replicator.errors import check_count, check_number
from replicator.writers.writer import Writer, check_writer


class Async:
    """Hand rows to `writer` on a thread of its own.

    Args:
      writer: Writer that is called on the thread.
      capacity: Number of rows that may wait; `write` blocks while so many do.
      timeout_s: Longest wait of a call for `writer`.

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
        # Acquired by `write`, released by the thread once the row is written. Rows in
        # the queue are lost with the process; a run that goes on writes them again.
        self._room = threading.BoundedSemaphore(capacity)
        # One thread, so in order: when a `flush` has run, so have all rows before it.
        # `close` ends it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replicator-writer")
        # Set by the thread, taken by the next call; no lock: each is one assignment.
        self._failure: Exception | None = None
        self._closed = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Queue the numbers of one step.

        Raises:
          TimeoutError: The queue stayed full for `timeout_s`.
          Exception: Error of the inner writer for an earlier row.
        """
        self._raise_failure()
        if not self._room.acquire(timeout=self._timeout_s):
            raise self._too_slow("take a row")
        self._thread.submit(self._write, step, dict(scalars))

    def flush(self) -> None:
        """Return when all queued rows are written and flushed.

        Raises:
          TimeoutError: That took longer than `timeout_s`.
          Exception: Error of the inner writer for a row, or in `flush`.
        """
        if not self._closed:
            self._finish(self._writer.flush)
        self._raise_failure()

    def close(self) -> None:
        """Write what is queued, close the inner writer and end the thread.

        Raises:
          TimeoutError: That took longer than `timeout_s`.
          Exception: Error of the inner writer for a row, or in `close`.
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
            # Raised again by the next call; the first of several is the cause.
            self._failure = self._failure or failure
        finally:
            self._room.release()

    def _finish(self, call: Callable[[], None]) -> None:
        done = self._thread.submit(call)
        if done not in wait([done], timeout=self._timeout_s).done:
            raise self._too_slow(call.__name__)
        done.result()

    def _too_slow(self, task: str) -> TimeoutError:
        return TimeoutError(
            f"`writer` must {task} within {self._timeout_s:g} s, got no answer from "
            f"{type(self._writer).__name__}. Write to a faster place."
        )

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
