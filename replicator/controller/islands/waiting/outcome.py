"""How something ended: a future without a value."""

import collections
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Self

_log = logging.getLogger(__name__)


class Outcome:
    """Ends once, with an error or without; any thread may end it, or wait for it.

    An op has one at each end; a `concurrent.futures.Future` costs ten times as much.

    >>> outcome = Outcome()
    >>> outcome.done()
    False
    >>> outcome.end().exception()
    """

    __slots__ = ("_calls", "_error", "_is_done")

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_done = False
        # Whoever adds one looks at `_is_done` afterwards; whoever takes one out, by an
        # atomic operation, calls it. So there is no lock.
        self._calls: collections.deque[Callable[[], object]] = collections.deque()

    def end(self, error: BaseException | None = None) -> Self:
        """End it, and return it."""
        self._error = error
        self._is_done = True
        self._call()
        return self

    def done(self) -> bool:
        """Return whether it ended."""
        return self._is_done

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for the end; return the error.

        Raises:
          TimeoutError: It did not end in time.
        """
        if not self._is_done:
            waiting = threading.Lock()
            waiting.acquire()
            call = waiting.release
            self.then(call)
            left_s = -1 if timeout_s is None else max(timeout_s, 0)
            if not waiting.acquire(timeout=left_s):
                with contextlib.suppress(ValueError):  # it ended just now
                    self._calls.remove(call)
                raise TimeoutError
        return self._error

    def then(self, call: Callable[[], object]) -> None:
        """Have a function called in the thread that ends it; at once if it ended."""
        self._calls.append(call)
        if self._is_done:
            self._call()

    def _call(self) -> None:
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                call()
            except Exception:
                _log.exception("what was to follow an op failed")


def first_error(inputs: Sequence[Outcome]) -> BaseException | None:
    """Return the error of one that has failed."""
    for each in inputs:
        if each.done() and (error := each.exception()) is not None:
            return error
    return None


def wait_for_error(inputs: Sequence[Outcome]) -> BaseException | None:
    """Wait until one fails, or all have ended; return the error.

    >>> wait_for_error([Outcome().end(), Outcome().end(ValueError("no"))])
    ValueError('no')
    """
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for each in inputs:
        each.then(lambda each=each: ended.put(each))
    errors = (ended.get().exception() for _ in inputs)
    return next((error for error in errors if error is not None), None)
