"""Turn signals into bytes of a socket, which a `select` over much else can wait for."""

import contextlib
import signal
import socket
from collections.abc import Iterable, Iterator
from types import FrameType


@contextlib.contextmanager
def signals_as_bytes(numbers: Iterable[int]) -> Iterator[socket.socket]:
    """Take these signals, in the main thread, until the end of the block.

    Args:
      numbers: Of the signals.

    Yields:
      A socket that gets a byte, the signal's number, for each. One that nobody reads
      loses those that do not fit.
    """

    def nothing(number: int, frame: FrameType | None) -> None:
        """Exist, so that Python writes the number to the socket."""

    inbox, outbox = socket.socketpair()
    inbox.setblocking(False)
    outbox.setblocking(False)
    before = {number: signal.signal(number, nothing) for number in numbers}
    # Written to by Python's C handler, also while Python itself is busy.
    wakeup = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
    try:
        yield inbox
    finally:
        # Before the sockets are closed: C code must not write to a number used anew.
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        inbox.close()
        outbox.close()
