"""Append numbers to a file of JSON lines: `{"step": 3, "time_s": 1.5, "loss": 0.31}`.

Lines are whole whatever happens: see `json_lines`. Numbers that JSON lacks are strings:
see `strict_json`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.json_lines import append_line, parse_line
from replicator.base.host.paths import checked_path, sync
from replicator.errors import ArgumentError

_OWN_NAMES = ("step", "time_s")


class JSONL:
    """Write one JSON object a line.

    Args:
      path: The file; it is appended to, and made with its folders if absent.
      clock: Clock of `time_s`, the seconds since this writer was made.

    Raises:
      ArgumentError: `path` is not a path.

    >>> writer = JSONL("runs/metrics.jsonl")
    >>> writer.write(1, {"loss": 0.5})
    >>> writer.close()
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None):
        path = checked_path("path", path)
        self._clock = clock or SystemClock()
        self._opened_s = self._clock.now_s()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (`close` closes it)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one line.

        Raises:
          ArgumentError: A metric bears the name of a field of the line itself.
          OSError: The line could not be written, for example to a full disk.
        """
        for name in _OWN_NAMES:
            if name in scalars:
                raise ArgumentError(
                    f"`metrics` must not use the names {' and '.join(_OWN_NAMES)}, "
                    f"got `{name}`. Rename the metric."
                )
        row = {"step": step, "time_s": self._clock.now_s() - self._opened_s}
        row |= {name: float(number) for name, number in scalars.items()}
        append_line(self._file, row)

    def flush(self) -> None:
        """Return when all lines are on the disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def drop_after(path: Path, *, step: int) -> None:
    """Rewrite a file of JSON lines without those of later steps, whole or not at all.

    Args:
      path: The file; nothing happens if there is none.
      step: The last step whose lines stay.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines() if _stays(line, step)]
    draft = path.with_suffix(".kept")
    draft.write_bytes(b"".join(line + b"\n" for line in kept))
    sync(draft)  # a new name must not outlive what it names, should the power fail
    # Dying before this leaves the old file, and a draft that the next call writes over.
    draft.replace(path)


def _stays(line: bytes, last_step: int) -> bool:
    try:
        return any(row["step"] <= last_step for row in parse_line(line))
    except (KeyError, TypeError):
        return False
