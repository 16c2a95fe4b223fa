"""An attack: a function that raises `Won` if it succeeded."""

import os
import time
from collections.abc import Callable
from pathlib import Path

LONG_S = 15.0
"""For what must end, on a machine that others use as well."""


class Won(Exception):
    """The attack did what it should not be able to do."""


class Untried(Exception):
    """The attack cannot be tried here; says why."""


def hold(is_held: object, told: str) -> None:
    """Return if the defence held.

    Raises:
      Won: It did not.
    """
    if not is_held:
        raise Won(told)


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Wait until something is so; tell whether it was, in time."""
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def memory_bytes(pid: int, name: str = "VmRSS") -> int:
    """Return the memory of a process: now, or at its peak (`VmHWM`)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(pid)


def forget_peak(pid: int) -> None:
    """Let the peak of a process's memory begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
