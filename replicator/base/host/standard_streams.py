"""Standard output and error that drop, and count, lines that cannot be written.

A full disk, a pager that was quit or `>&-` must not end a process that only prints: a
launcher would end all its processes with it. All commands, launchers and workers write
through this module.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_NOWHERE, _OUT, _ERR = -1, 1, 2


class _Descriptor(io.RawIOBase):
    """A descriptor of the process; a write to it does not fail.

    Attributes:
      lost: Number of lines that could not be written.
      why: Error of the last of them; None for none.
      missing: Lines lost since the last successful write; the next one reports them.
    """

    def __init__(self, number: int) -> None:
        self.name = self._number = number
        self.lost = 0
        self.why: OSError | None = None
        self.missing = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def close(self) -> None:
        """Stay open: a stream made from this closes it when it is collected."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        try:
            if self.missing:
                note = f"\n... {_counted(self.missing)} could not be written here\n"
                os.write(self._number, note.encode())
                self.missing = 0
            while left:
                left = left[_write_some(self._number, left) :]
        except OSError as failure:
            lines = max(1, bytes(left).count(b"\n"))
            self.lost, self.why = self.lost + lines, failure
            self.missing += lines
        return len(data)


_PLACES = {number: _Descriptor(number) for number in (_NOWHERE, _OUT, _ERR)}


def lossy(stream: TextIO | None) -> TextIO:
    """Return a stream to the same file that drops lines it cannot write.

    >>> notebook = io.StringIO()
    >>> lossy(notebook) is notebook
    True

    Args:
      stream: A stream like `sys.stdout`. None, Python's value for one that is closed,
        drops all; the stream of a notebook or a test is returned as it is.
    """
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()
    try:
        place = _PLACES[_NOWHERE if stream is None else stream.fileno()]
    except (OSError, ValueError, KeyError, AttributeError):
        return cast("TextIO", stream)
    return io.TextIOWrapper(
        cast("Any", place),
        encoding=getattr(stream, "encoding", "utf-8"),
        # A letter that the locale cannot write must not fail, either.
        errors="backslashreplace",
        line_buffering=True,
    )


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """Let `sys.stdout` and `sys.stderr` drop lines that cannot be written, meanwhile.

    >>> with lossy_output():
    ...     flush_output()
    """
    # A file opened next must not become the standard output of a child.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(lossy, before)
    try:
        yield
    finally:
        flush_output()
        sys.stdout, sys.stderr = before


def take_loss() -> tuple[str, OSError] | None:
    """Return the loss of standard output since the last call; None for none.

    >>> take_loss() is None
    True

    Returns:
      A sentence, and the error of the last line.
    """
    flush_output()
    place = _PLACES[_OUT]
    lines, why = place.lost, place.why
    place.lost, place.missing, place.why = 0, 0, None
    if why is None:
        return None
    sentence = f"{_counted(lines)} of the output could not be written: {why.strerror}."
    return sentence, why


def flush_output() -> None:
    """Flush standard output and error; errors are ignored.

    >>> flush_output()
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def say_raw(text: str) -> None:
    """Write to standard error without a lock: a hung thread may hold the stream's."""
    if sys.__stderr__ is not None:  # else the descriptor may belong to any file
        with contextlib.suppress(OSError):
            os.write(_ERR, text.encode(errors="backslashreplace"))


def _write_some(number: int, data: memoryview) -> int:
    try:
        return os.write(number, data)
    except BlockingIOError:  # set by another process that shares the descriptor
        select.select([], [number], [])
        return 0


def _counted(lines: int) -> str:
    return f"{lines} line" if lines == 1 else f"{lines} lines"
