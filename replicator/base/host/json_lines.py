"""Append-only files of JSON lines, which a kill tears in the last line at most.

A line is one write to a file opened to append, so lines of several threads and
processes do not mix, and nobody needs a lock. The first line after a torn one starts
anew; readers skip the torn one.
"""

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

from replicator.base.host.strict_json import strict_json
from replicator.base.types import PyTree


def append_line(file: io.FileIO, value: PyTree) -> None:
    """Append a value as one line of JSON.

    Args:
      file: Opened unbuffered, to append and to read: `open(path, "a+b", buffering=0)`.
      value: See `strict_json`.

    Raises:
      OSError: The line could not be written, for example to a full disk.
    """
    line = strict_json(value).encode() + b"\n"
    size = file.seek(0, os.SEEK_END)
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        # Cut short by a kill or a full disk: it must not swallow this line.
        line = b"\n" + line
    if file.write(line) != len(line):  # the disk is full now
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def parse_lines(data: bytes) -> list[Any]:
    r"""Return the values of all whole lines, in order.

    >>> parse_lines(b'{"step": 1}\n{"step": 2}\n{"st')
    [{'step': 1}, {'step': 2}]
    """
    return [value for line in data.splitlines() for value in parse_line(line)]


def parse_line(line: bytes) -> list[Any]:
    """Return the value of a line; nothing for one that was cut short.

    >>> parse_line(b'{"step": 1}'), parse_line(b'{"st')
    ([{'step': 1}], [])
    """
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def read_lines(path: Path) -> list[Any]:
    """Return the values of all whole lines of a file; of an absent file, none."""
    try:
        return parse_lines(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return []
