"""An event that calls back when it is set."""

import threading
from collections.abc import Callable

_LOOK_AGAIN_S = 0.2


class StopEvent(threading.Event):
    """A `threading.Event` that calls back, once, in the thread that sets it."""

    def __init__(self) -> None:
        super().__init__()
        # Guards `_callbacks`; no callback runs under it. Re-entrant: a signal may set
        # the event while this thread holds the lock. (The event's own lock is not: no
        # signal handler of ours sets it.)
        self._calling = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Set it, and call the callbacks."""
        # The flag first: `when_set` sees it, or has its callback in the list below.
        super().set()
        with self._calling:
            callbacks, self._callbacks = self._callbacks, []
        # Outside of the lock: a callback may set other events, and take their locks.
        for callback in callbacks:
            callback()

    def when_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once it is set, at once if it is; return a function that cancels.

        >>> event = StopEvent()
        >>> cancel = event.when_set(lambda: print("stopping"))
        >>> event.set()
        stopping
        """
        with self._calling:
            if not self.is_set():
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._calling:
            # Too late for a callback that `set` has taken already: it is still called.
            if callback in self._callbacks:
                self._callbacks.remove(callback)


def mirrored(event: threading.Event, *, over: threading.Event) -> StopEvent:
    """Return a `StopEvent` that follows any event; the event itself if it is one.

    Args:
      event: Event to follow.
      over: Ends the following, which takes a thread for an event of another kind.

    >>> event = StopEvent()
    >>> mirrored(event, over=threading.Event()) is event
    True
    """
    if isinstance(event, StopEvent):
        return event
    mirror = StopEvent()

    def follow() -> None:
        while not over.is_set():
            if event.wait(_LOOK_AGAIN_S):
                mirror.set()
                return

    # Ends once `event` or `over` is set; a daemon, for a worker that never sets them.
    threading.Thread(target=follow, name="stop-event", daemon=True).start()
    return mirror
