"""Hooks of a run, called every so many steps or seconds: write, report, call back.

>>> from replicator import hooks
>>> show = hooks.Callback(lambda event: print(event.metrics), hooks.every(n_steps=100))
"""

from replicator.hooks.callbacks import Callback, StateCallback
from replicator.hooks.metric_hooks import Report, WriteMetrics
from replicator.hooks.protocol import (
    Hook,
    MetricsEvent,
    StateEvent,
    StepEvent,
    checked_hooks,
)
from replicator.hooks.schedule import Every, Trigger, every

__all__ = [
    "Callback",
    "Every",
    "Hook",
    "MetricsEvent",
    "Report",
    "StateCallback",
    "StateEvent",
    "StepEvent",
    "Trigger",
    "WriteMetrics",
    "checked_hooks",
    "every",
]
