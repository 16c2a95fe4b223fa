"""Frames in a pipe between a launcher and a host: a kind, a length, the bytes.

With the standard library only: both ends run this source, the host what it is sent.
"""

import os
import struct

# From the launcher.
ORDER, SIGNAL = b"o", b"s"
# From the host. `REFUSED` has the reason that nothing was started.
BEGUN, OUT, ERR, ENDED, REFUSED = b"b", b"1", b"2", b"e", b"r"
# From both: nothing happened, but the other end is there.
BEAT = b"."

PREAMBLE = b"\0replicator frames follow\n"
"""First bytes from the host: a login shell may print before it."""

_HEAD = struct.Struct(">cI")
_MOST_BYTES = 1 << 24
_FULL_BYTES = 1 << 18
_READ_BYTES = 1 << 16


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    r"""Return the bytes of a frame.

    >>> frame(b"s", b"15")
    b's\x00\x00\x00\x0215'
    """
    return _HEAD.pack(kind, len(payload)) + payload


class Frames:
    r"""Frames of a stream that arrives in pieces.

    Args:
      preamble: Bytes before the first frame; what comes before them is dropped.

    >>> frames = Frames()
    >>> frames.feed(b"s\x00\x00\x00\x021"), frames.feed(b"5")
    ([], [(b's', b'15')])
    """

    def __init__(self, preamble: bytes = b"") -> None:
        self._preamble = preamble
        self._begun = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take a piece; return kind and payload of each frame that ends in it.

        Raises:
          ValueError: The first is too long to be one.
        """
        self._begun += data
        if self._preamble:
            before, found, after = self._begun.partition(self._preamble)
            if not found:
                self._begun = before[-len(self._preamble) :]
                return []
            self._begun, self._preamble = after, b""
        found = []
        while len(self._begun) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._begun)
            if size > _MOST_BYTES:
                if found:  # first: a shell may print as it ends, after the last one
                    break
                raise ValueError(f"a frame of {size} bytes")
            if len(self._begun) < _HEAD.size + size:
                break
            found.append((kind, self._begun[_HEAD.size :][:size]))
            self._begun = self._begun[_HEAD.size + size :]
        return found


class Outbox:
    """Bytes on their way into a pipe, which takes them when it can."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting = bytearray()
        os.set_blocking(descriptor, False)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """True if whoever fills it has to wait."""
        return len(self._waiting) >= _FULL_BYTES

    def put(self, data: bytes) -> None:
        """Add bytes."""
        self._waiting += data

    def flush(self) -> None:
        """Write what the pipe takes now.

        Raises:
          OSError: Nobody reads it any more.
        """
        while self._waiting:
            try:
                written = os.write(self.descriptor, self._waiting)
            except BlockingIOError:
                return
            del self._waiting[:written]


def read_some(descriptor: int) -> bytes | None:
    """Return what a pipe holds, b"" at its end, None if it is empty for now."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None
