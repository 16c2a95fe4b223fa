"""Meaning of exit codes, for every launcher, and the text that describes each."""

import signal
from pathlib import Path
from typing import Literal

from replicator.distributed.processes.guard import KILLED_BY_LAUNCHER
from replicator.exit_codes import HUNG, PREEMPTED

_VMSTAT = Path("/proc/vmstat")
_MEANINGS: dict[int | None, Literal["done", "preempted", "hung", "killed"]] = {
    0: "done",
    PREEMPTED: "preempted",
    HUNG: "hung",
    KILLED_BY_LAUNCHER: "killed",  # by its guard
    -signal.SIGKILL: "killed",  # by the kernel
    None: "killed",  # nothing is known: its host or its parent is gone
}


def meaning(
    code: int | None,
) -> Literal["done", "preempted", "hung", "killed", "failed"]:
    """Return what an exit code means to a launcher.

    Args:
      code: Negative for a signal, as `subprocess` has it; None if it is not known.

    >>> [meaning(code) for code in (0, 1, 75, 76, -9)]
    ['done', 'failed', 'preempted', 'hung', 'killed']
    """
    return _MEANINGS.get(code, "failed")


def describe_code(code: int, *, out_of_memory: bool = False) -> str:
    """Describe how a process ended: "exited with code 1", "was killed by SIGKILL".

    Args:
      code: Negative for a signal, as `subprocess` has it.
      out_of_memory: Whether the kernel killed something for memory meanwhile.

    >>> describe_code(75)
    'exited with code 75 (preempted)'
    >>> describe_code(-9, out_of_memory=True)
    'was killed by SIGKILL: the machine was out of memory'
    """
    if code >= 0:
        known = f" ({meaning(code)})" if code in (PREEMPTED, HUNG) else ""
        return f"exited with code {code}{known}"
    if out_of_memory and code == -signal.SIGKILL:
        return "was killed by SIGKILL: the machine was out of memory"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def count_memory_kills() -> int:
    """Return how often the kernel has killed for memory since it started; 0 unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
