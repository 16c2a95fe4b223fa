"""Show on the terminal what workers write to their logs, labelled and in colours.

A thread of its own looks at all files ten times a second: a terminal that takes no more
holds up nothing else. Output of a node is shown as text, not obeyed by the terminal as
commands; its file has it as it was.
"""

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from replicator.base.host.plain_text import plain
from replicator.base.host.standard_streams import lossy
from replicator.distributed.processes.output import Lines
from replicator.launchpad_bridge.launchers.worker_logs import READING

_EVERY_S = 0.1
_PIECE_BYTES = 1 << 16
_MOST_BEHIND_BYTES = 1 << 20
_LAST_LOOK_S = 2.0
_RESET = "\x1b[0m"
_COLOURS = tuple(f"\x1b[{code}m" for code in (36, 32, 33, 35, 34, 96, 92, 93, 95, 94))


def uses_colours(terminal: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether to write in colours: to a terminal, unless `NO_COLOR` is set.

    >>> uses_colours(sys.stdout, {"NO_COLOR": "1"})
    False
    """
    is_terminal = getattr(terminal, "isatty", bool)
    return not environ.get("NO_COLOR") and bool(is_terminal())


class LogTail:
    """Shows logs as they grow.

    Args:
      logs: File of each worker; it need not be there yet.
      terminal: Stream to write to; by default `sys.stdout`, as it is at the time.
    """

    def __init__(
        self, logs: Mapping[str, Path], *, terminal: TextIO | None = None
    ) -> None:
        self._terminal = terminal
        width = max((len(name) for name in logs), default=0)
        self._files = [
            _File(name, path, width, _COLOURS[number % len(_COLOURS)])
            for number, (name, path) in enumerate(logs.items())
        ]
        # Set once, by `close`: a last look is due.
        self._over = threading.Event()
        # Alone reads the files. `close` ends it, but waits for it only so long: a
        # daemon, as it may be writing to a terminal that takes nothing.
        self._thread = threading.Thread(target=self._run, name="log tail", daemon=True)

    def start(self) -> None:
        """Begin to show."""
        self._thread.start()

    def close(self) -> None:
        """Show what is left, without waiting long for a terminal that takes nothing."""
        self._over.set()
        # What it cannot show in this time is in the files.
        self._thread.join(_LAST_LOOK_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(_EVERY_S)
            try:
                while self._show(is_last=is_over):
                    pass
            except (OSError, ValueError):  # the terminal is gone: the files are whole
                return
        for file in self._files:
            file.close()

    def _show(self, *, is_last: bool) -> bool:
        """Pass on a piece of each file; return whether there may be more."""
        # Looked up each time: a test or a notebook may have put another one there.
        terminal = lossy(self._terminal or sys.stdout)
        in_colours = uses_colours(terminal, os.environ)
        pieces = [
            file.read(in_colours=in_colours, is_last=is_last) for file in self._files
        ]
        # One write for all workers: few system calls, and no line is cut by another.
        text = "".join(pieces)
        if text:
            terminal.write(text)
            terminal.flush()
        return bool(text)


class _File:
    def __init__(self, name: str, path: Path, width: int, colour: str) -> None:
        self._name = name
        self._path = path
        self._width = width
        self._colour = colour
        self._descriptor: int | None = None
        # What an earlier run has left there is not shown.
        self._at = path.stat().st_size if path.exists() else 0
        self._lines = Lines()

    def read(self, *, in_colours: bool, is_last: bool) -> str:
        """Return whole lines that were written since the last look, labelled."""
        data = self._new_bytes()
        lines = self._lines.feed(data)
        if is_last and not data:
            lines += self._lines.rest()
        label = f"{self._name:{self._width}} | "
        if in_colours:
            label = f"{self._colour}{label}{_RESET}"
        return "".join(
            f"{label}{plain(line.decode('utf-8', 'backslashreplace'))}\n"
            for line in lines
        )

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _new_bytes(self) -> bytes:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, READING)
            except OSError:  # not there yet, or a link in its place
                return b""
        # A worker may write faster than a terminal shows; the newest is shown then.
        note = b""
        behind = os.fstat(self._descriptor).st_size - self._at
        if behind > _MOST_BEHIND_BYTES:
            skipped = behind - _PIECE_BYTES
            self._at += skipped
            note = f"... {skipped} bytes are only in {self._path}\n".encode()
        data = os.pread(self._descriptor, _PIECE_BYTES, self._at)
        self._at += len(data)
        return note + data
