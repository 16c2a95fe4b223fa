"""`replicator launch`: one group of processes, here or on hosts, run by a `Driver`.

The main thread drives and takes signals; a thread for each process passes on its output
and reports its exit (by a pidfd, so it is seen within milliseconds). Linux only.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE as FAKE_DEVICES
from replicator.base.host.held_folder import hold_folder
from replicator.base.host.standard_streams import lossy_output, take_loss
from replicator.distributed import prepared
from replicator.distributed.clusters import Cluster, as_environment
from replicator.distributed.processes.driver import Driver
from replicator.distributed.processes.member import Member
from replicator.distributed.processes.output import write_lines
from replicator.distributed.processes.policy import (
    LaunchPolicy,
    ProcessEnd,
    ended,
    exit_code,
    signal_asked,
    stop_asked,
)
from replicator.distributed.processes.ports import free_port
from replicator.distributed.processes.signals import handled
from replicator.distributed.processes.states import Ended, State
from replicator.distributed.remote.hosts import Hosts
from replicator.distributed.remote.member import HostMember
from replicator.distributed.report_progress import VARIABLE, read_progress
from replicator.errors import ArgumentError
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CLEANING_S = 10.0


def launch(
    command: Sequence[str],
    policy: LaunchPolicy,
    *,
    devices_per_process: int | None = None,
    environ: Mapping[str, str] | None = None,
    beside: Callable[[Path], AbstractContextManager[Mapping[str, str]]] | None = None,
    preload: tuple[str, ...] = (),
    hosts: Hosts | None = None,
) -> int:
    """Run a command as a group of processes, here or on hosts, until it has ended.

    Each process finds the others by `replicator.distributed.initialize()`. Call it in
    the main thread: it takes the signals. Lines that cannot be printed are dropped.

    Args:
      command: Command line of each process.
      policy: Number of processes, restarts and time limits.
      devices_per_process: Fake CPU devices for each; by default those it finds.
      environ: The environment to start from; this process's by default.
      beside: Opens what serves the processes, over all restarts; gets a folder of this
        user alone, and yields variables for them.
      preload: Modules that the processes of the next attempt, which are kept ready
        (`prepared.py`), have imported; none to keep none ready.
      hosts: Hosts of the processes; by default all run on this one. Each needs the
        same folder. Nothing of `environ` goes there.

    Returns:
      0 if all ended well, otherwise the code of the first failure since there was
      progress; 75 if the run was preempted and can go on. After a signal that asked
      it to stop, 128 + its number for any failure but 76 (hung).

    Raises:
      ArgumentError: This is not Linux.
    """
    if not hasattr(os, "pidfd_open"):
        raise ArgumentError(
            f"`launch` must run on Linux, got {sys.platform}. Start each process "
            "yourself, as `docs/guides/clusters.md` shows."
        )
    environ = dict(os.environ if environ is None else environ)
    # Lines appear when they are printed, and are not lost in a crash.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    if devices_per_process is not None:
        environ[FAKE_DEVICES] = str(devices_per_process)
    with (
        lossy_output(),
        tempfile.TemporaryDirectory(prefix="replicator-launch-") as folder,
        contextlib.ExitStack() as stack,
    ):
        # This folder is private to the user. It is deleted here, or by a guard if this
        # launcher is killed.
        environ |= _share_secret(policy, environ, Path(folder))
        if beside is not None:
            environ |= stack.enter_context(beside(Path(folder)))
        group = _Group(command, policy, environ, Path(folder), preload, hosts)
        # What is ignored stays so: nohup ignores SIGHUP.
        taken = [n for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        stack.enter_context(handled(taken, lambda n, _: group.report(stop_asked(n))))
        # Undone in the reverse order: first nothing runs any more, then the folder is
        # no longer held, and signals have their old handlers again.
        stack.callback(os.close, hold_folder(folder))
        stack.callback(group.close)
        if hosts is not None:
            group.log([hosts.describe()])
        finish = group.run()
        assert group.state is not None, "it has run"
        if finish.failure is not None:
            group.show(finish.failure)
        if loss := take_loss():
            group.log([loss[0]])
        return exit_code(group.state, finish)


def _share_secret(
    policy: LaunchPolicy, environ: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Write the run's secret for its processes; return the variable with its path.

    It is that of the environment, which may be of a larger group; otherwise a new one
    for several processes. One process alone gets no new one: it needs none.
    """
    secret = Secret.from_environment(environ)
    if secret is None and policy.processes > 1:
        secret = Secret.generate()
    if secret is None:
        return {}
    secret.write(folder / "secret")
    return {FILE_VARIABLE: str(folder / "secret")}


class _Group(Driver):
    def __init__(
        self,
        command: Sequence[str],
        policy: LaunchPolicy,
        environ: Mapping[str, str],
        folder: Path,
        preload: tuple[str, ...],
        hosts: Hosts | None,
    ) -> None:
        super().__init__([policy.unit], policy.timeouts)
        self._command = command
        self._policy = policy
        self._environ = environ
        self._folder = folder
        self._preload = preload
        self._hosts = hosts
        self._address = ""
        self._members: dict[str, Member | HostMember] = {}
        self._prepared: dict[int, Member] = {}  # by rank, for the next attempt

    def close(self) -> None:
        """Leave nothing behind, also after an error of this launcher itself."""
        until_s = time.monotonic() + _CLEANING_S
        # By their guards, which sweep best; by force only what is left then.
        members = [*self._members.values(), *self._prepared.values()]
        for member in members:
            member.kill()
        for member in members:
            member.join(max(0.0, until_s - time.monotonic()))
            member.kill()

    def start_worker(self, name: str, attempt: int) -> Member | HostMember:
        rank = self._policy.unit.workers.index(name)
        # The first to be started in each attempt. The port of the attempt before may
        # still be taken: by a process that cannot be killed, or by the kernel.
        if rank == 0:
            self._address = self._new_address()
        variables = {
            **self._group_variables(rank),
            "REPLICATOR_ATTEMPT": str(attempt),
        }
        if self._hosts is None:
            member = self._start_here(rank, variables)
        else:
            member = self._start_there(self._hosts, rank, variables)
        self._members[name] = member
        return member

    def _new_address(self) -> str:
        hosts = self._hosts
        return hosts.new_address() if hosts else f"127.0.0.1:{free_port()}"

    def _start_there(
        self, hosts: Hosts, rank: int, variables: Mapping[str, str]
    ) -> HostMember:
        secret = self._environ.get(FILE_VARIABLE)
        return hosts.start(
            rank,
            self._command,
            variables=variables,
            secret=Path(secret).read_bytes() if secret else b"",
            folder=self._folder,
            signal_asked=self._signal_asked,
            report=self.report,
        )

    def _start_here(self, rank: int, variables: dict[str, str]) -> Member:
        variables[VARIABLE] = str(self._folder / f"progress-{rank}")
        member = self._prepared.pop(rank, None)
        if member is None or not member.begin(variables):
            member = self._member(rank, self._command, variables)
        if self._preload:
            waiting = prepared.command(
                self._command[0], self._preload, list(self._command[1:])
            )
            self._prepared[rank] = self._member(rank, waiting, {}, waits=True)
        return member

    def _member(
        self,
        rank: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        waits: bool = False,
    ) -> Member:
        return Member(
            rank,
            command,
            environ={**self._environ, **variables},
            folder=self._folder,
            signal_asked=self._signal_asked,
            report=self.report,
            waits=waits,
        )

    def _signal_asked(self) -> int:
        assert self.state is not None, "it runs"
        number = signal_asked(self.state.stopped_by)
        assert number is not None, "only a signal asks for a stop"
        return number

    def to_ended(self, end: ProcessEnd, state: State) -> Ended:
        # Files that each process replaces as a whole, so none is read half written.
        steps = map(read_progress, self._folder.glob("progress-*[0-9]"))
        safe_step = max((step for step in steps if step is not None), default=None)
        hung_grace_s = self._policy.hung_grace_s
        return ended(end, state, hung_grace_s=hung_grace_s, safe_step=safe_step)

    def log(self, messages: Sequence[str]) -> None:
        lines = [text.encode() for text in messages]
        write_lines(sys.stderr.buffer, "[launch] ", lines)

    def _group_variables(self, rank: int) -> dict[str, str]:
        """Return variables by which the processes meet, at a new port in each attempt.

        One process alone is not a group here. It may be one of a larger group, which it
        finds as it would without a launcher.
        """
        if self._policy.processes == 1:
            return {}
        return as_environment(
            Cluster(
                kind="replicator",
                coordinator=self._address,
                num_processes=self._policy.processes,
                process_id=rank,
            )
        )

    def show(self, failure: Ended) -> None:
        """Print the first failure's last lines again: thousands may have followed."""
        how = failure.text.removeprefix(f"{failure.name} ")
        first = f"the first failure was {failure.name} in attempt {failure.attempt}"
        self.log([f"{first}: it {how}. Its last lines:"])
        end: ProcessEnd = failure.exited
        write_lines(sys.stderr.buffer, f"[{end.rank}] ", end.last_lines)
