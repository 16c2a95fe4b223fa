"""Option types of a run.

>>> from replicator.options import Follow, Retention
"""

from replicator.checkpoint.retention import Retention
from replicator.hooks.schedule import Every, every
from replicator.training.best_metric import BestSoFar, Follow
from replicator.training.evaluate_hook import EvaluateEvery
from replicator.training.nonfinite.spikes import Spikes
from replicator.training.options import RunOptions
from replicator.training.watchdog.limits import Limits

__all__ = [
    "BestSoFar",
    "EvaluateEvery",
    "Every",
    "Follow",
    "Limits",
    "Retention",
    "RunOptions",
    "Spikes",
    "every",
]
