"""The hosts of a group, as its launcher starts processes there."""

import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from replicator.distributed.clusters import join_address
from replicator.distributed.processes.policy import ProcessEnd
from replicator.distributed.processes.ports import any_port
from replicator.distributed.remote.bundle import remote_command
from replicator.distributed.remote.member import HostMember
from replicator.distributed.remote.remote_host import RemoteHost, check_via, connection
from replicator.distributed.report_progress import write_progress
from replicator.errors import ArgumentError


class Hosts:
    """Hosts, one for each process of a group.

    Args:
      hosts: Hosts by process; at that of process 0 all others meet.
      via: Command that reaches a host, instead of ssh: see `remote_host`.
      lost_after_s: Seconds without contact after which a host ends its process.

    Raises:
      ArgumentError: `via` has no place for the host, or there is no such program.
    """

    def __init__(
        self,
        hosts: Sequence[RemoteHost],
        *,
        via: str | None = None,
        lost_after_s: float,
    ) -> None:
        if via is not None:
            check_via(via)
        program = shlex.split(via or "ssh")[0]
        if shutil.which(program) is None:
            raise ArgumentError(
                f"`{'via' if via else 'ssh'}` must be a program of this host, got "
                f"{program!r}, which is not in PATH. Install it."
            )
        self._hosts, self._via = hosts, via
        self._lost_after_s = lost_after_s
        self._last: dict[int, HostMember] = {}  # by rank

    def __len__(self) -> int:
        return len(self._hosts)

    def describe(self) -> str:
        """Return one line that names each process's host."""
        places = (
            f"process {i} on {host.address}" for i, host in enumerate(self._hosts)
        )
        return ", ".join(places)

    def new_address(self) -> str:
        """Return the next address at which the processes meet."""
        return join_address(self._hosts[0].name, any_port())

    def start(
        self,
        rank: int,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        secret: bytes,
        folder: Path,
        signal_asked: Callable[[], int],
        report: Callable[[ProcessEnd], None],
    ) -> HostMember:
        """Start a process on its host.

        Args:
          rank: Its number.
          command: Its command line; it begins with the Python of this host, in whose
            place comes that of the other.
          variables: What the group adds to its environment.
          secret: The run's secret, empty for none.
          folder: The launcher's, whose name is that of the run.
          signal_asked: As of `HostMember`; `report` likewise.
          report: See `signal_asked`.
        """
        host, before = self._hosts[rank], self._last.get(rank)
        remote = remote_command(host.python or command[0])
        member = HostMember(
            rank,
            host.address,
            connection(host, remote, via=self._via),
            {
                "owner": f"{folder.name}-{rank}",
                "arguments": command[1:],
                "directory": os.getcwd(),
                # Lines appear when they are printed, and are not lost in a crash.
                "environment": {
                    "PYTHONUNBUFFERED": "1",
                    **host.environment,
                    **variables,
                },
                "secret": secret.hex(),
            },
            lost_after_s=self._lost_after_s,
            was_used=before is not None and before.was_used,
            folder=folder,
            progress=lambda step: write_progress(folder / f"progress-{rank}", step),
            signal_asked=signal_asked,
            report=report,
        )
        self._last[rank] = member
        return member
