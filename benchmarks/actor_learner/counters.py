"""Counters of the processes of one way of working, in a file that all of them map.

Each writes its own numbers only, so there is no lock: a reader sees an aligned integer
as it was before or after.
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IS_OPEN, _UPDATES, _FIRST = range(3)  # then these for each process:
_PID, _ACTED, _STEPPING_NS, _EACH = range(4)
_LOOK_S = 0.02


class Reading(NamedTuple):
    """Counts at one moment.

    Attributes:
      at_s: When.
      acted: Environment steps.
      updates: Of the learner.
      stepping_s: Processor time within environments.
      processor_s: User and system time of each of its processes.
    """

    at_s: float
    acted: int
    updates: int
    stepping_s: float
    processor_s: list[float]


class Counters:
    """Counts of one way of working, and its gate; pickled, it is the same elsewhere."""

    def __init__(
        self, path: Path, processes: int, mode: Literal["w+", "r+"] = "w+"
    ) -> None:
        """Map the file; with the mode "w+" all are 0 and the gate is shut."""
        self._made_of = path, processes
        shape = (_FIRST + _EACH * processes,)
        self._counts = np.memmap(path, np.int64, mode, shape=shape)
        self._each = self._counts[_FIRST:].reshape(processes, _EACH)

    def __reduce__(self) -> tuple:
        return Counters, (*self._made_of, "r+")

    def enter(self, process: int) -> None:
        """Register this process by its number, from 0."""
        self._each[process, _PID] = os.getpid()

    def add_acted(self, process: int, steps: int, stepping_s: float) -> None:
        """Count environment steps of this process, and what they took."""
        self._each[process, _STEPPING_NS] += int(1e9 * stepping_s)
        self._each[process, _ACTED] += steps

    def add_updates(self, updates: int) -> None:
        """Count updates; only the learner may."""
        self._counts[_UPDATES] += updates

    def open_gate(self, is_open: bool) -> None:
        """Let them work, or wait."""
        self._counts[_IS_OPEN] = is_open

    def wait_for_gate(self, stop: threading.Event) -> bool:
        """Wait until they may work; return False where they are to stop."""
        while not self._counts[_IS_OPEN]:
            if stop.wait(_LOOK_S):
                return False
        return not stop.is_set()

    @property
    def updates(self) -> int:
        """Return how many there were."""
        return int(self._counts[_UPDATES])

    @property
    def most_acted(self) -> int:
        """Return the environment steps of the process that took most."""
        return int(self._each[:, _ACTED].max())

    def read(self) -> Reading:
        """Return everything at this moment."""
        return Reading(
            at_s=time.monotonic(),
            acted=int(self._each[:, _ACTED].sum()),
            updates=self.updates,
            stepping_s=float(self._each[:, _STEPPING_NS].sum() / 1e9),
            processor_s=[processor_s(pid) for pid in self._each[:, _PID].tolist()],
        )


def processor_s(pid: int) -> float:
    """Return the user and system time of a process; 0 for number 0."""
    return _stat(pid)[1] if pid else 0.0


def processor_s_below(pid: int) -> float:
    """Return that of a process and of all below it that live."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            each = int(path.name)
            children.setdefault(_stat(each)[0], []).append(each)
    total_s, waiting = 0.0, [pid]
    while waiting:
        each = waiting.pop()
        total_s += processor_s(each)
        waiting += children.get(each, [])
    return total_s


def _stat(pid: int) -> tuple[int, float]:
    """Return the parent of a process, and the seconds that it used."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # a name may hold anything
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
