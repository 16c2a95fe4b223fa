"""The result of a call to be: a `concurrent.futures.Future` that knows its call."""

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from replicator.rpc.client.link import Answer, Link
from replicator.rpc.client.request import Request

# Guards `_is_given_up` of all futures: held for one assignment, no lock taken under it.
_CANCELLING = threading.Lock()


class CallFuture(concurrent.futures.Future[Any]):
    """Result to be of `client.futures.method(...)`.

    Attributes:
      request: The call.
      link: Link on which it waits for its answer; None while it waits to be sent.
      inherited: Error that `result` raises in a forked child, where no thread reads.
    """

    def __init__(
        self, request: Request, take: Callable[["CallFuture", Answer], None]
    ) -> None:
        super().__init__()
        self.request = request
        # Written by the thread that sends the call; `cancel` may read it at any time.
        self.link: Link | None = None
        self.inherited: Exception | None = None
        self.call_id = request.call_id
        self.deadline_s = request.deadline_s
        self.is_sent = False
        self.reported: tuple[str, float] | None = None
        self._take = take
        self._is_given_up = False

    def settle(self, answer: Answer) -> None:
        """Set the result from an answer; runs in the thread that reads."""
        self._take(self, answer)

    def result(self, timeout: float | None = None) -> Any:
        """Return the result; see `concurrent.futures.Future.result`."""
        self._read_if_this_thread_reads(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception; see `concurrent.futures.Future.exception`."""
        self._read_if_this_thread_reads(timeout)
        return super().exception(timeout)

    def cancel(self) -> bool:
        """Give the call up, whether it runs or not, and cancel it in the server.

        Returns:
          False if it has a result already.
        """
        if not super().cancel():
            return False
        # Several threads may cancel at once: one of them alone notifies waiters.
        with _CANCELLING:
            is_first, self._is_given_up = not self._is_given_up, True
        if is_first:
            # This alone wakes threads in `concurrent.futures.wait`.
            self.set_running_or_notify_cancel()
            if self.link is not None:
                self.link.give_up(self)
        return True

    def _read_if_this_thread_reads(self, timeout: float | None) -> None:
        """Read on if this thread is the reader, in a callback that waits for us."""
        if self.inherited is not None:
            raise self.inherited
        # Any other thread just waits for the reader, which sets the result.
        if self.link is not None and self.link.role.is_mine():
            until_s = math.inf if timeout is None else time.monotonic() + timeout
            self.link.read_until(self.done, until_s)
