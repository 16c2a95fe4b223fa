"""Start a group of processes on this host, watch it, start it again when one dies.

`supervisor` decides, `group` performs, `guard` stands between the two and each process:
it lets nothing live on that its process started.
"""

from replicator.distributed.processes.group import launch
from replicator.distributed.processes.policy import Policy

__all__ = ["Policy", "launch"]
