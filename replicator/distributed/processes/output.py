"""Label what the processes of a group print, line by line, and keep the last lines.

Nothing of it is dropped: a pipe is its only copy, so a terminal that takes nothing
holds the process up. Workers of a program write to files, of which
`launchers/log_tail.py` may drop what a terminal is too slow for. `Lines` serves both.
"""

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import BinaryIO

_KEPT_LINES = 400
_LONGEST_LINE = 1 << 16
_SHOWN_LINES = 20
# More than a pipe holds: what is still written after the process is gone is dropped.
_PIECES_LEFT = 64
_TRACEBACK = b"Traceback (most recent call last):"


class Lines:
    r"""Lines of a stream that arrives in pieces.

    >>> lines = Lines()
    >>> lines.feed(b"one\ntw"), lines.feed(b"o\n")
    ([b'one'], [b'two'])
    """

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take a piece; return the lines that end in it, or are too long to wait."""
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > _LONGEST_LINE:
            lines += self.rest()
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line if it has no end yet, as it is."""
        line, self._begun = self._begun, b""
        return [line] if line else []


# Held while lines are written, so that those of several processes do not mix. Threads
# of all processes and the driver's take it; no other lock is taken while it is held.
_WRITING = threading.Lock()


def write_lines(to: BinaryIO, label: str, lines: Sequence[bytes]) -> None:
    """Write whole lines, each after a label; any thread may."""
    if lines:
        with _WRITING:
            to.write(b"".join(label.encode() + line + b"\n" for line in lines))
            to.flush()


class LabelledText:
    """Text of one process, passed on line by line with a label before each.

    Args:
      label: Text before each line, for example `[2] `.
      to: Stream that lines go to.
    """

    def __init__(self, label: str, to: BinaryIO) -> None:
        self._label = label
        self._to = to
        self._lines = Lines()
        self._last: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take a piece; pass on the lines that end in it."""
        self._pass_on(self._lines.feed(data))

    def end(self) -> None:
        """Pass on what is left, also half a line."""
        self._pass_on(self._lines.rest())

    def last_lines(self) -> list[bytes]:
        """Return the last traceback, with what follows it, or the last few lines."""
        lines = list(self._last)
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        # A chain of causes begins with its first traceback.
        while len(starts) > 1 and _is_cause(lines[starts[-2] : starts[-1]]):
            starts.pop()
        return lines[starts[-1] :] if starts else lines[-_SHOWN_LINES:]

    def _pass_on(self, lines: list[bytes]) -> None:
        self._last += lines
        write_lines(self._to, self._label, lines)


class LabelledLines(LabelledText):
    """One stream of one process, passed on with a label before each line.

    Args:
      descriptor: Pipe that its output arrives by; closed with this.
      label: As of `LabelledText`; `to` likewise.
      to: See `label`.
    """

    def __init__(self, descriptor: int, label: str, to: BinaryIO) -> None:
        super().__init__(label, to)
        self.descriptor = descriptor
        # A read must not hold up the thread, which waits for the exit as well.
        os.set_blocking(descriptor, False)

    def pump(self) -> bool:
        """Pass on one piece of what has arrived; false once nothing is left."""
        try:
            data = os.read(self.descriptor, _LONGEST_LINE)
        except BlockingIOError:
            return False
        self.feed(data)
        return bool(data)

    def close(self) -> None:
        """Pass on what is left, also half a line, and read no more."""
        for _ in range(_PIECES_LEFT):
            if not self.pump():
                break
        self.end()
        os.close(self.descriptor)


def _is_cause(lines: list[bytes]) -> bool:
    phrases = (b"direct cause of the following", b"another exception occurred")
    return any(phrase in line for line in lines for phrase in phrases)
