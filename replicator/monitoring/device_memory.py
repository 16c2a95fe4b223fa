"""Memory of a run: on each of this host's devices, and on the host."""

import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from replicator.base.types import Device

_STATM = Path("/proc/self/statm")
_NAMES = {
    "bytes_in_use": "bytes_in_use",
    "peak_bytes": "peak_bytes_in_use",
    "bytes_limit": "bytes_limit",
}
_PAGE_BYTES = resource.getpagesize()
# `ru_maxrss` counts bytes on macOS and kibibytes elsewhere.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


def memory_numbers(devices: Sequence[Device]) -> dict[str, float]:
    """Return the bytes in use now, and the most that were in use at once.

    Args:
      devices: Devices of this process.

    Returns:
      `memory/host_bytes_in_use` and `memory/host_peak_bytes`; and for the device at
      place i `memory/<i>/bytes_in_use`, `memory/<i>/peak_bytes` and
      `memory/<i>/bytes_limit`, as far as its backend has them: a CPU has none.
    """
    numbers = _host_numbers()
    for place, device in enumerate(devices):
        stats = device.memory_stats() or {}
        for name, found in _NAMES.items():
            if found in stats:
                numbers[f"memory/{place}/{name}"] = stats[found]
    return numbers


def _host_numbers() -> dict[str, float]:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
    now = _resident_bytes()
    if now is None:
        return {"memory/host_peak_bytes": most}
    # The kernel adds the peak up later than the present.
    return {
        "memory/host_bytes_in_use": now,
        "memory/host_peak_bytes": max(most, now),
    }


def _resident_bytes() -> int | None:
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except OSError:  # no Linux
        return None
