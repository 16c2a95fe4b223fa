"""Notice that a run hangs: tell where every thread of every process is, and exit."""

from replicator.watchdog.limits import Limits
from replicator.watchdog.watchdog import Watchdog

__all__ = ["Limits", "Watchdog"]
