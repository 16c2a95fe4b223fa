"""Bound the shared memory behind messages that the other end has not read.

A message whose body is in shared memory takes a hundred bytes of the socket: without
this, a peer that never reads could make us hold thousands of bodies before the socket
is full. The system reports how much of the socket is unread, at 2 us; so it is asked
only when many bytes have been sent since the other end had last read all.
"""

import contextlib
import fcntl
import select
import socket
import termios
import time

from replicator.errors import CallTimeoutError

UNREAD_BYTES = 64 << 20
"""Past this, or one message, a sender waits until the other end has read."""
_LONGEST_LOOK_MS = 16


class UnreadBytes:
    """Upper bound of the shared memory sent since the other end had read all."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        """Start with none.

        Args:
          sock: Socket of the messages.
          peer: Name of the other end, for errors.
        """
        self._socket = sock
        self._peer = peer
        # Without a lock, by any thread that sends: see `add`.
        self._num_bytes = 0

    def add(self, num_bytes: int, *, timeout_s: float | None) -> None:
        """Count the body of a message; wait before it if too many are unread.

        Raises:
          CallTimeoutError: The other end did not read in time.
        """
        before = self._num_bytes
        if before and before + num_bytes > UNREAD_BYTES:
            with contextlib.suppress(ValueError):  # closed: the sender will see
                self._wait(timeout_s)
            before = 0
        # Of threads that send at once one may be missed: the bound is not exact.
        self._num_bytes = before + num_bytes

    def _wait(self, timeout_s: float | None) -> None:
        """Wait until all was read, or the other end is gone, as the sender will see."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._socket.fileno(), 0)  # for its end alone
        look_ms = 1
        while self._is_unread() and not poller.poll(look_ms):
            look_ms = min(2 * look_ms, _LONGEST_LOOK_MS)
            if until_s is not None and time.monotonic() >= until_s:
                raise CallTimeoutError(
                    f"{self._peer} does not read: {self._num_bytes} bytes of shared "
                    "memory were sent that it may not have seen."
                )

    def _is_unread(self) -> bool:
        with contextlib.suppress(OSError):  # it was closed between the two calls
            # A number of four bytes.
            return any(fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))
        return False
