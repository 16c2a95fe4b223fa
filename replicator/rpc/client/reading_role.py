"""Leader/follower reading: one waiting caller reads for all.

The role is a lock. A thread that does not get it follows: it waits until the reader
delivers its answer, or until it is woken because the reader leaves.

Invariant: while the role is free and a thread follows, a thread that will take the role
is awake. A follower lists itself, then looks whether the role is taken; the reader that
leaves frees the role, then looks into the list; so one of the two sees the other. A
follower that was woken and has its answer already wakes the next one.
"""

import contextlib
import queue
import threading
from collections import deque

Inbox = queue.SimpleQueue[None]


class ReadingRole:
    """A lock whose next holder is woken by its last one.

    Attributes:
      try_take: Take the role if it is free, `try_take(False)`; return whether it was.
    """

    def __init__(self) -> None:
        # The role itself: held over `receive`, and over callbacks of futures. While it
        # is held, sends may take the connection's own lock; never the other way round.
        self._lock = threading.Lock()
        self.try_take = self._lock.acquire
        # Appended by any thread; a deque's operations are atomic.
        self._followers: deque[Inbox] = deque()
        # Written by the holder of the role only.
        self._owner: int | None = None

    def own(self) -> None:
        """Note that this thread has the role, for `is_mine`."""
        self._owner = threading.get_ident()

    def is_mine(self) -> bool:
        """Return whether this thread has the role, and has called `own`.

        Then it reads already: it called a function of the user, which calls again.

        >>> role = ReadingRole()
        >>> role.try_take(False), role.is_mine()
        (True, False)
        >>> role.own()
        >>> role.is_mine()
        True
        """
        return self._owner == threading.get_ident()

    def leave(self) -> None:
        """Free the role, and wake one follower."""
        # Before the release: afterwards it is the next holder's.
        self._owner = None
        self._lock.release()
        if self._followers:
            self._wake_one()

    def follow(self, inbox: Inbox, timeout_s: float) -> None:
        """Wait for an item in `inbox` while another reads, at most `timeout_s`.

        Then look whether there is an answer, and try to take the role if not. Call
        `pass_on` before leaving for good.
        """
        self._followers.append(inbox)
        try:
            if self._lock.locked():
                with contextlib.suppress(queue.Empty):
                    inbox.get(timeout=timeout_s)
        finally:
            # Not there if `_wake_one` took it: then `pass_on` must wake another.
            with contextlib.suppress(ValueError):
                self._followers.remove(inbox)

    def pass_on(self) -> None:
        """Wake one follower, if no thread reads."""
        if self._followers and not self._lock.locked():
            self._wake_one()

    def _wake_one(self) -> None:
        try:
            self._followers.popleft().put(None)
        except IndexError:
            return
