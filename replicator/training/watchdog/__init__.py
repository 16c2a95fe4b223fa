"""Watchdog: end a run that hangs, with the stacks of all threads of all processes."""

from replicator.training.watchdog.limits import Limits
from replicator.training.watchdog.watchdog import Watchdog

__all__ = ["Limits", "Watchdog"]
