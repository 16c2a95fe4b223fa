"""Say how a process ended, from what the kernel tells its parent."""

import signal
from pathlib import Path

from replicator.exit_codes import HUNG, PREEMPTED

_VMSTAT = Path("/proc/vmstat")


def describe_code(code: int, *, out_of_memory: bool = False) -> str:
    """Say how a process ended: "exited with code 1", "was killed by SIGKILL".

    Args:
      code: Negative for a signal, as `subprocess` has it.
      out_of_memory: Whether the kernel killed something for memory meanwhile.
    """
    if code >= 0:
        known = {PREEMPTED: " (preempted)", HUNG: " (hung)"}
        return f"exited with code {code}{known.get(code, '')}"
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
