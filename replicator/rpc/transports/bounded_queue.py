"""A queue from thread to thread that holds so much at most, and can end."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class BoundedQueue(Generic[_Item]):
    """Items in order; who puts waits while it is full, who takes while it is empty."""

    def __init__(
        self, most: int, *, size: Callable[[_Item], int] | None = None
    ) -> None:
        """Start empty.

        Args:
          most: How much it holds; one item that is larger than that is held alone.
          size: Of an item; 1 by default.
        """
        self._most = most
        self._size_of = size or (lambda _: 1)
        self._items: deque[_Item] = deque()
        self._size = 0
        self._has_ended = False
        # Guards all of the above. May be entered again: the garbage collector may close
        # a connection in here. No other lock is taken inside of it.
        self._lock = threading.RLock()
        self._has_item = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_ended(self) -> bool:
        """Tell whether nothing more can be put."""
        return self._has_ended

    def put(self, item: _Item, timeout_s: float | None) -> None:
        """Append; raise TimeoutError while it is full, EOFError after its end."""
        size = self._size_of(item)
        with self._lock:
            if not (self._has_ended or self._fits(size)):
                self._has_room.wait_for(
                    lambda: self._has_ended or self._fits(size), timeout_s
                )
            if self._has_ended:
                raise EOFError
            if not self._fits(size):
                raise TimeoutError
            self._items.append(item)
            self._size += size
            self._has_item.notify()

    def take(self, timeout_s: float | None) -> _Item:
        """Return the first; raise TimeoutError if none comes, EOFError at the end."""
        with self._lock:
            if not self._items and not self._has_ended:
                self._has_item.wait_for(
                    lambda: self._items or self._has_ended, timeout_s
                )
            if self._items:
                return self._popped()
        raise EOFError if self._has_ended else TimeoutError

    def take_small(self, most: int) -> _Item | None:
        """Return the first if there is one, and it is of that size at most."""
        with self._lock:
            if self._items and self._size_of(self._items[0]) <= most:
                return self._popped()
        return None

    def wait_empty(self) -> None:
        """Return when nothing is in it any more, or it has ended."""
        with self._lock:
            self._has_room.wait_for(lambda: not self._items or self._has_ended)

    def end(self, *, drop: bool = False) -> list[_Item]:
        """Take nothing more, and wake who waits; `drop`, and return, what is in it."""
        with self._lock:
            self._has_ended = True
            dropped = []
            while drop and self._items:
                dropped.append(self._items.popleft())
            self._has_item.notify_all()
            self._has_room.notify_all()
        return dropped

    def _fits(self, size: int) -> bool:
        return not self._items or self._size + size <= self._most

    def _popped(self) -> _Item:
        item = self._items.popleft()
        self._size -= self._size_of(item)
        self._has_room.notify_all()  # not each may fit
        return item
