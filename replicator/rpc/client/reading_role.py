"""Who reads a connection of a client: one of those who wait for an answer.

The role is a lock. Who does not get it follows: it waits to be answered by who reads,
or to be woken when that one leaves.

What must hold: while the role is free and somebody follows, somebody is on the way who
will take it. A follower lists itself, then looks whether the role is taken; who leaves
it sets it free, then looks into the list; so one of the two sees the other. A follower
that was woken and has its answer already passes the waking on.
"""

import contextlib
import queue
import threading
from collections import deque
from typing import final

Inbox = queue.SimpleQueue[None]


@final
class ReadingRole:
    """A lock whose next holder is woken by its last one.

    Attributes:
      try_take: Take the role if it is free, `try_take(False)`; return whether it was.
    """

    def __init__(self) -> None:
        # The role itself: held over `receive`, and over callbacks of futures.
        self._lock = threading.Lock()
        self.try_take = self._lock.acquire
        self._followers: deque[Inbox] = deque()
        self._owner: int | None = None

    def own(self) -> None:
        """Note that this thread has the role, for `is_mine`."""
        self._owner = threading.get_ident()

    def is_mine(self) -> bool:
        """Tell whether this thread has the role, and has said so with `own`.

        Then it reads already: it called a function of the user, which calls again.
        """
        return self._owner == threading.get_ident()

    def leave(self) -> None:
        """Set the role free, and wake one who follows."""
        # Before the release: afterwards it is the next holder's.
        self._owner = None
        self._lock.release()
        if self._followers:
            self._wake_one()

    def follow(self, inbox: Inbox, timeout_s: float) -> None:
        """Wait for an item in `inbox` while somebody reads, at most `timeout_s`.

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
        """Wake one who follows, if nobody reads."""
        if self._followers and not self._lock.locked():
            self._wake_one()

    def _wake_one(self) -> None:
        try:
            self._followers.popleft().put(None)
        except IndexError:
            return
