"""An event that, once it is set, also calls those who want to know."""

import threading
from collections.abc import Callable

_LOOK_AGAIN_S = 0.2


class StopEvent(threading.Event):
    """A `threading.Event` that calls back, once, in the thread that sets it."""

    def __init__(self) -> None:
        super().__init__()
        # A signal may set it while this thread holds the lock.
        # The event's own lock is not re-entrant: no signal handler of ours sets it.
        self._calling = threading.RLock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Set it, and call who waits for that."""
        # The flag first: `when_set` sees it, or has its callback in the list below.
        super().set()
        with self._calling:
            callbacks, self._callbacks = self._callbacks, []
        # Outside of the lock: a callback may set other events, and take their locks.
        for callback in callbacks:
            callback()

    def when_set(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once it is set, at once if it is; return what cancels that."""
        with self._calling:
            if not self.is_set():
                self._callbacks.append(callback)
                return lambda: self._forget(callback)
        callback()
        return lambda: None

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._calling:
            # Too late for one that `set` has taken already: that is still called.
            if callback in self._callbacks:
                self._callbacks.remove(callback)


def mirrored(event: threading.Event, *, over: threading.Event) -> StopEvent:
    """Return a `StopEvent` that follows any event; itself where it is one.

    Args:
      event: What to follow.
      over: Ends the following, which takes a thread for an event of another kind.
    """
    if isinstance(event, StopEvent):
        return event
    mirror = StopEvent()

    def follow() -> None:
        while not over.is_set():
            if event.wait(_LOOK_AGAIN_S):
                mirror.set()
                return

    threading.Thread(target=follow, name="stop-event", daemon=True).start()
    return mirror
