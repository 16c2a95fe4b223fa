"""Start processes on this host, watch them, start them again, leave nothing behind.

    guard, guarded, sweep      nothing outlives a launcher, whoever is killed
    signals                    who hears of a Ctrl-C
    output, exits, symptoms    what a process said, how it ended, and why
    states, supervisor         when to do what, purely: for groups and programs
    policy, member, group      `replicator launch`

The launchers of `launchpad_bridge` stand on the first four.
"""

from replicator.distributed.processes.group import launch
from replicator.distributed.processes.policy import Policy

__all__ = ["Policy", "launch"]
