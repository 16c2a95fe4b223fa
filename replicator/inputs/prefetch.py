"""Run an iterator ahead of its consumer, in a thread.

The thread stops when the iterator ends or fails, when the consumer closes it, and when
the consumer drops it: the thread refers to the channel only, never to the `Prefetcher`.
Its errors are raised again at the consumer. The consumer never waits without a limit.

The thread works in bursts: a full channel wakes it again when it is half empty. Two
Python threads that alternate item by item cost each other 100 µs per item.
"""

import collections
import contextlib
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Generic, Literal, TypeVar

import jax

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.tracebacks import short_tracebacks
from replicator.errors import InputTimeoutError

T = TypeVar("T")

WARN_AFTER_S = 60.0
_POLL_S = 0.05  # between a waiting consumer's looks at its clock
_CLOSE_WAIT_S = 2.0  # well inside the 5 s in which schedulers let a program end
_FORGOTTEN_WAIT_S = 0.5

_log = logging.getLogger(__name__)


@short_tracebacks
class Prefetcher(Generic[T]):
    """An iterator whose items are made ahead of time by a thread of its own.

    Attributes:
      stall_s: Seconds that the consumer has waited for items so far.

    Args:
      source: Generator that the thread iterates and closes; no longer the caller's.
      size: Items kept ready, or a function of the first item that returns the number.
      timeout_s: Longest wait for one item, in seconds.
      clock: Clock of waiting times.
      is_over: Called while an item is waited for; True ends the iterator.
      unasked: Number of items to make ahead, at least 1; each later one is made when it
        is waited for. None makes all ahead.
    """

    def __init__(
        self,
        source: Generator[T, None, None],
        *,
        size: int | Callable[[T], int] = 2,
        timeout_s: float = 600.0,
        clock: Clock | None = None,
        is_over: Callable[[], bool] | None = None,
        unasked: int | None = None,
    ):
        self._is_over = is_over or (lambda: False)
        self._channel: _Channel[T] = _Channel(size, unasked)
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._taken = 0
        self.stall_s = 0.0
        # A daemon: code of a dataset that hangs must not keep the process alive. Ended
        # by `close`, or when this object is collected.
        self._thread = threading.Thread(
            target=_fill,
            args=(self._channel, source, bool(jax.config.read("jax_enable_x64"))),
            name="replicator-input",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._channel, self._thread)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item.

        Raises:
          StopIteration: The source has ended, this was closed, or `is_over`.
          InputTimeoutError: No item came within `timeout_s`.
          Exception: Any error of the source, with its traceback.
        """
        started_s = self._clock.now_s()
        try:
            self._wait_until_ready(started_s)
        finally:
            self.stall_s += self._clock.now_s() - started_s
        item = self._channel.take()
        self._taken += 1
        return item

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop its items; closing twice is fine."""
        self._finalizer.detach()
        _stop(self._channel, self._thread, wait_s=_CLOSE_WAIT_S)
        if self._thread.is_alive():
            _log.warning(
                "The input thread is still inside the dataset's code %.0f s after it "
                "was asked to stop; it ends with the batch it reads. It is at:\n%s",
                _CLOSE_WAIT_S,
                _where_is(self._thread),
            )

    def _wait_until_ready(self, started_s: float) -> None:
        warned = False
        while not self._channel.wait_ready(_POLL_S):
            if self._is_over():
                raise StopIteration
            waited_s = self._clock.now_s() - started_s
            match decide_wait(waited_s, warned=warned, timeout_s=self._timeout_s):
                case "fail":
                    raise InputTimeoutError(
                        f"`dataset` must yield batch {self._taken} within "
                        f"{self._timeout_s:g} s, got nothing after {waited_s:.0f} s. "
                        "Look in the log for where its thread is, or raise `timeout_s`."
                    )
                case "warn":
                    warned = True
                    _log.warning(
                        "Waited %.0f s for batch %d of the dataset. Its thread is at:"
                        "\n%s",
                        waited_s,
                        self._taken,
                        _where_is(self._thread),
                    )


def decide_wait(
    waited_s: float, *, warned: bool, timeout_s: float
) -> Literal["wait", "warn", "fail"]:
    """Decide what a consumer does after waiting `waited_s` for one item.

    >>> decide_wait(60.0, warned=False, timeout_s=600.0)
    'warn'
    """
    if not warned and waited_s >= min(WARN_AFTER_S, timeout_s):
        return "warn"
    return "fail" if waited_s >= timeout_s else "wait"


class _Channel(Generic[T]):
    """A bounded queue with an end, an error, and a request to stop."""

    def __init__(self, size: int | Callable[[T], int], unasked: int | None = None):
        self._left = unasked  # to make before the consumer waits for the next
        self._items: collections.deque[T] = collections.deque()
        self._size = size if callable(size) else lambda first: size
        self._room: int | None = None  # until the first item is here
        self._filling = True  # false from when it is full until it is half empty
        self._ended = False
        self._error: BaseException | None = None
        # Guards all fields above: the thread adds, the consumer takes, either ends the
        # channel. No other lock is taken under it. Re-entrant: the garbage collector
        # may close the channel from a thread that is inside it.
        self._changed = threading.Condition()

    def put(self, item: T) -> bool:
        """Wait for room and add `item`; return whether to make one more.

        Has no limit of its own: closing or forgetting the consumer ends it.
        """
        with self._changed:
            if self._room is None:
                self._room = self._size(item)
            self._changed.wait_for(self._may_fill)
            if self._ended:
                return False
            self._items.append(item)
            self._filling = len(self._items) < self._room
            # A consumer waits only while it is empty.
            if len(self._items) == 1:
                self._changed.notify_all()
            if self._left is not None:
                self._left -= 1
                # Wait for the consumer: others may read the iterator after this.
                self._changed.wait_for(lambda: self._ended or self._left != 0)
            return not self._ended

    def take(self) -> T:
        """Return the oldest item; at the end, raise the error or `StopIteration`."""
        with self._changed:
            if self._items:
                item = self._items.popleft()
                if not self._filling and self._may_fill():
                    self._changed.notify_all()
                return item
            raise self._error or StopIteration

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `take` can return or raise; return whether it can."""
        if self._items:  # without the lock: only the consumer removes items
            return True
        with self._changed:
            if self._left == 0 and not self._items:
                self._left = 1
                self._changed.notify_all()
            return self._changed.wait_for(
                lambda: self._ended or bool(self._items), timeout_s
            )

    def _may_fill(self) -> bool:
        return (
            self._ended or self._filling or len(self._items) <= (self._room or 0) // 2
        )

    def end(self, error: BaseException | None = None) -> None:
        """End the channel; the consumer still gets the items in it."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()

    def drop(self) -> None:
        """Drop all items and end the channel: the consumer is gone."""
        with self._changed:
            self._items.clear()
            self.end()


def _fill(channel: _Channel[T], source: Generator[T, None, None], x64: bool) -> None:
    """Move items into the channel until either side ends; the thread's body."""
    try:
        # JAX keeps this setting per thread: batches are cast as in the consumer's.
        with jax.enable_x64(x64), contextlib.closing(source):
            for item in source:
                if not channel.put(item):
                    break
    except BaseException as error:  # raised again by `take`, in the consumer
        channel.end(error)
    else:
        channel.end()


def _stop(
    channel: _Channel, thread: threading.Thread, wait_s: float = _FORGOTTEN_WAIT_S
) -> None:
    # The short wait is for the end of the interpreter: a thread inside JAX that it
    # kills may abort the process.
    channel.drop()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(wait_s)


def _where_is(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(it has ended)"
