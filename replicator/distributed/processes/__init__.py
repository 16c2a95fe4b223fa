"""Start processes on this host, watch them, start them again, leave nothing behind.

    guard, guarded, sweep         nothing outlives a launcher, whatever is killed
    signals                       signals as bytes of a socket, or to a handler
    output, exits, symptoms       output of a process, its exit code, its cause
    states, supervisor, driver    when to start, stop and kill, purely; and doing it
    policy, member, group         `replicator launch`

The launchers of `launchpad_bridge` use all but the last line.
"""

from replicator.distributed.processes.group import launch
from replicator.distributed.processes.policy import LaunchPolicy

__all__ = ["LaunchPolicy", "launch"]
