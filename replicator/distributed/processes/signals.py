"""Turn signals into bytes of a socket, which a `select` over much else can wait for."""

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def signals_as_bytes(numbers: Iterable[int]) -> Iterator[socket.socket]:
    """Take these signals, in the main thread, until the end of the block.

    Args:
      numbers: Numbers of the signals.

    Yields:
      A socket that gets a byte, the signal's number, for each. If nobody reads it,
      those that do not fit are lost.
    """
    inbox, outbox = socket.socketpair()
    # C code writes in the middle of anything, and must not wait.
    inbox.setblocking(False)
    outbox.setblocking(False)
    # A handler has to exist, so that Python writes the number to the socket.
    with inbox, outbox, handled(numbers, lambda *_: None):
        # Written to by Python's C handler, also while Python itself is busy.
        wakeup = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        try:
            yield inbox
        finally:
            # Before the sockets are closed: C code must not write to a number that is
            # used anew.
            signal.set_wakeup_fd(wakeup)


@contextlib.contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Call a handler for these signals, in the main thread, until the block's end.

    Args:
      numbers: Numbers of the signals.
      handler: As `signal.signal` takes it.
    """
    # Python calls it in the main thread, between two instructions there: it may take no
    # lock that the main thread could hold.
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
