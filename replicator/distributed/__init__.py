"""Many processes as one run: join, agree, and name processes that are missing."""

from replicator.distributed.agreement import any_process, barrier, exchange
from replicator.distributed.clusters import Cluster
from replicator.distributed.initialize import initialize
from replicator.distributed.launchers.detection import detect
from replicator.distributed.report_progress import report_progress

__all__ = [
    "Cluster",
    "any_process",
    "barrier",
    "detect",
    "exchange",
    "initialize",
    "report_progress",
]
