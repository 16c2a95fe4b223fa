"""Run an iterator ahead of its consumer, in a thread.

The thread stops when the iterator ends or fails, when the consumer closes, and when
the consumer forgets it: it holds the channel only, never the `Prefetcher`. What it
raises is raised again at the consumer. The consumer never waits without a limit.

The thread works in bursts: a full channel wakes it again when it is half empty. Two
Python threads that hand over item by item cost each other 100 µs an item.
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
from replicator.errors import InputTimeoutError

T = TypeVar("T")

WARN_AFTER_S = 60.0
_POLL_S = 0.05  # how often a starving consumer looks at its clock
_CLOSE_WAIT_S = 2.0  # well inside the 5 s that a scheduler gives to a program to end
_FORGOTTEN_WAIT_S = 0.5

_log = logging.getLogger(__name__)


class Prefetcher(Generic[T]):
    """An iterator whose items are made ahead of time by a thread of its own.

    Args:
      source: What the thread iterates and closes; it belongs to the thread now.
      size: Items kept ready, or how many those are if all are like the first.
      timeout_s: Longest wait for one item, in seconds.
      clock: Where waiting times come from.
      is_over: Asked while an item is waited for: whether to end instead.
      unasked: So many items are made ahead, at least 1; each after them when it is
        waited for. None for all.
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
        self._stall_s = 0.0
        self._thread = threading.Thread(
            target=_fill,
            args=(self._channel, source, bool(jax.config.read("jax_enable_x64"))),
            name="replicator-input",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._channel, self._thread)
        self._thread.start()

    @property
    def stall_s(self) -> float:
        """Seconds that the consumer has waited for items so far."""
        return self._stall_s

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item.

        Raises:
          StopIteration: The source has ended, this was closed, or `is_over`.
          InputTimeoutError: Nothing came within `timeout_s`.
          Exception: Whatever the source raised, with its traceback.
        """
        started_s = self._clock.now_s()
        try:
            self._wait_until_ready(started_s)
        finally:
            self._stall_s += self._clock.now_s() - started_s
        item = self._channel.take()
        self._taken += 1
        return item

    def __enter__(self) -> "Prefetcher[T]":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and drop what it made; closing twice is fine."""
        self._finalizer.detach()
        _stop(self._channel, self._thread, wait_s=_CLOSE_WAIT_S)
        if self._thread.is_alive():
            _log.warning(
                "The input thread is still inside the dataset's code %.0f s after it "
                "was told to stop; it ends with the batch it reads. It is at:\n%s",
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
                        "Look where its thread is (the log says), or raise `timeout_s`."
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
    """Decide what a consumer does that has waited so long for one item."""
    if not warned and waited_s >= min(WARN_AFTER_S, timeout_s):
        return "warn"
    return "fail" if waited_s >= timeout_s else "wait"


class _Channel(Generic[T]):
    """A bounded queue that also carries the end, a failure, and the wish to stop."""

    def __init__(self, size: int | Callable[[T], int], unasked: int | None = None):
        self._left = unasked  # to be made before somebody waits for the next
        self._items: collections.deque[T] = collections.deque()
        self._size = size if callable(size) else lambda first: size
        self._room: int | None = None  # until the first item is here
        self._filling = True  # false from when it is full until it is half empty
        self._ended = False
        self._error: BaseException | None = None
        # Of all the above: the thread adds, the consumer takes, either ends it, and no
        # other lock is taken inside. Re-entrant: the garbage collector may close the
        # channel from a thread that is inside it.
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
                # Not before it is asked for: an iterator may have other readers after.
                self._changed.wait_for(lambda: self._ended or self._left != 0)
            return not self._ended

    def take(self) -> T:
        """Return the oldest item; at the end, raise what the end is."""
        with self._changed:
            if self._items:
                item = self._items.popleft()
                if not self._filling and self._may_fill():
                    self._changed.notify_all()
                return item
            raise self._error or StopIteration

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `take` has an answer; return whether it has."""
        if self._items:  # only the consumer takes, so there it stays
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
        """Say that nothing follows; the consumer still gets what is here."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()

    def drop(self) -> None:
        """Say that the consumer is gone."""
        with self._changed:
            self._items.clear()
            self.end()


def _fill(channel: _Channel[T], source: Generator[T, None, None], x64: bool) -> None:
    """Move items into the channel until either side ends; the thread's body."""
    try:
        # JAX keeps this setting by thread: batches are cast as the consumer's thread
        # would cast them.
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
