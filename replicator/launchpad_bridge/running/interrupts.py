"""Signals while programs run: Ctrl-C once is graceful, twice immediate.

The handlers ask the runs to stop, and raise nothing while this process waits for one:
`wait` raises `KeyboardInterrupt` itself, once all has stopped. In other code of the
script they act as they would without us. They are installed by the first launch of the
main thread, and removed when no run is left.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from replicator.launchpad_bridge.running import exit_status

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Changed only in the main thread, in which the handlers run; threads of timers append
# to `_to_raise`.
_before: dict[int, Any] = {}
_to_raise: "list[Callable[[FrameType | None], BaseException | None]]" = []
# Counted only by the main thread, in which the handler runs.
_waits = 0


def watch() -> None:
    """Install the handlers, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if handler not in (_handle, signal.SIG_IGN, None):
                _before[signum] = signal.signal(signum, _handle)


def tidy() -> None:
    """Restore the handlers before ours, in the main thread, if no run is left."""
    # A run ends in its driver's thread: the main thread does it after its wait.
    is_main = threading.current_thread() is threading.main_thread()
    if exit_status.live_runs() or not is_main:
        return
    for signum, handler in list(_before.items()):
        if signal.getsignal(signum) is _handle:
            signal.signal(signum, handler)
        del _before[signum]


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Mark that the main thread waits for a run: handlers must not raise in it."""
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
      decide: Called with the main thread's frame; returns the error to raise there, or
        None to raise nothing.
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
    # A wait whose runs have just ended raises by itself.
    if not (_waits or (runs and exit_status.is_exiting(frame))):
        _as_before(signum, frame)


def _as_before(signum: int, frame: FrameType | None) -> None:
    """Act as without our handlers, but let programs stop first."""
    by_default = (
        signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
    )
    handler = _before.get(signum, by_default)
    if callable(handler):
        handler(signum, frame)
    elif handler == signal.SIG_DFL:
        raise SystemExit(128 + signum)
