"""Notice that a run hangs: tell where every thread of every process is, and exit."""

from replicator.training.watchdog.limits import Limits
from replicator.training.watchdog.watchdog import Watchdog

__all__ = ["Limits", "Watchdog"]
