"""Ask the kernel whether it has killed a process because memory ran out."""

from pathlib import Path

_VMSTAT = Path("/proc/vmstat")


def count_memory_kills() -> int:
    """Return how often the kernel has killed for memory since it started; 0 unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0
