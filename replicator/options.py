"""What can be said of a run beside its step and its data; the types for it.

>>> from replicator.options import Follow, Retention
"""

from replicator.checkpoint.retention import Retention
from replicator.training.best_metric import BestSoFar, Follow
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.hooks.schedule import Every, every
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.watchdog.limits import Limits

__all__ = [
    "BestSoFar",
    "EvaluateEvery",
    "Every",
    "Follow",
    "Limits",
    "Retention",
    "Spikes",
    "every",
]
