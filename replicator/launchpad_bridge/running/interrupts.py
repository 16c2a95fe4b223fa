"""Signals while programs run: Ctrl-C once is graceful, twice immediate.

The handlers tell the runs, and raise nothing where this process waits for one: `wait`
raises `KeyboardInterrupt` itself, once all has stopped. In other code of the script
they act as they would without us. They are installed by the first launch of the main
thread, and taken away when no run is left.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from replicator.launchpad_bridge.running import exit_status

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Changed in the main thread only, which the handlers run in. `_to_raise` is appended to
# by timers' threads.
_before: dict[int, Any] = {}
_to_raise: "list[Callable[[FrameType | None], BaseException | None]]" = []
# Counted by the main thread only, which the handler runs in.
_waits = 0


def watch() -> None:
    """Have signals told to all runs, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if handler not in (_handle, signal.SIG_IGN, None):
                _before[signum] = signal.signal(signum, _handle)


def tidy() -> None:
    """Give the signals back, where that can be done and nobody needs them."""
    # A run ends in its driver's thread: the end of the main thread's wait does it then.
    is_main = threading.current_thread() is threading.main_thread()
    if exit_status.live_runs() or not is_main:
        return
    for signum, handler in list(_before.items()):
        if signal.getsignal(signum) is _handle:
            signal.signal(signum, handler)
        del _before[signum]


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Know that the main thread waits for a run, and is not to be torn out of that."""
    global _waits
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits += 1
    try:
        yield
    finally:
        _waits -= 1
        tidy()


def raise_in_main(
    decide: "Callable[[FrameType | None], BaseException | None]",
) -> None:
    """Interrupt the main thread, from another one, with an error.

    Args:
      decide: Gets the frame that the main thread is in; returns what to raise there, or
        None if that is not a place for it.
    """
    main = threading.main_thread()
    if main.ident is None or signal.getsignal(signal.SIGINT) is not _handle:
        return
    _to_raise.append(decide)
    signal.pthread_kill(main.ident, signal.SIGINT)


def _handle(signum: int, frame: FrameType | None) -> None:
    if _to_raise and signum == signal.SIGINT:
        error = _to_raise.pop()(frame)
        if error is not None and not _waits:
            raise error
        return
    runs = exit_status.live_runs()
    for run in runs:
        run.interrupt(signum)
    # A wait whose runs have just ended is about to say so itself.
    if not (_waits or (runs and exit_status.is_exiting(frame))):
        _as_before(signum, frame)


def _as_before(signum: int, frame: FrameType | None) -> None:
    """Do what the signal would have done without us, but let programs stop first."""
    by_default = (
        signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    )
    handler = _before.get(signum, by_default)
    if callable(handler):
        handler(signum, frame)
    elif handler == signal.SIG_DFL:
        raise SystemExit(128 + signum)
