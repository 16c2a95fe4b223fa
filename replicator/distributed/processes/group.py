"""Perform what the supervisor decides: start processes, watch them, pass on signals.

One thread and one `select` over everything that can happen: output, an exit (a pidfd,
so it is seen within milliseconds), a signal, the time. Linux only.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from replicator.base.host.clock import Clock, SystemClock
from replicator.base.host.fake_devices import ENVIRONMENT_VARIABLE as FAKE_DEVICES
from replicator.base.host.held_folder import hold_folder
from replicator.base.host.standard_streams import lossy_output, take_loss
from replicator.distributed.clusters import Cluster, as_environment
from replicator.distributed.processes.exits import count_memory_kills
from replicator.distributed.processes.member import Member
from replicator.distributed.processes.output import LabelledLines
from replicator.distributed.processes.policy import (
    Policy,
    ProcessEnd,
    ended,
    exit_code,
    process_name,
    signal_asked,
    stop_asked,
)
from replicator.distributed.processes.ports import free_port
from replicator.distributed.processes.signals import signals_as_bytes
from replicator.distributed.processes.states import (
    Action,
    Ended,
    Event,
    Finish,
    Kill,
    Say,
    Start,
    Stop,
    TimeUp,
)
from replicator.distributed.processes.supervisor import (
    begin,
    decide,
    next_deadline_s,
)
from replicator.distributed.report_progress import VARIABLE, read_progress
from replicator.errors import ArgumentError
from replicator.rpc.security.secret import FILE_VARIABLE, Secret

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CLEANING_S = 10.0


def launch(
    command: Sequence[str],
    policy: Policy,
    *,
    devices_per_process: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a command as a group of processes on this host until it has ended.

    Each process finds the others by `replicator.distributed.initialize()`. Call it in
    the main thread: it takes the signals. Lines that cannot be printed are dropped.

    Args:
      command: What each process runs.
      policy: How many processes, and how patient to be with them.
      devices_per_process: Fake CPU devices for each; by default those it finds.
      environ: The environment to start from; this process's by default.

    Returns:
      0 if all ended well, otherwise the code of the first failure since there was
      progress; 75 if the run was preempted and can go on.

    Raises:
      ArgumentError: This is not Linux.
    """
    if not hasattr(os, "pidfd_open"):
        raise ArgumentError(
            f"`launch` must run on Linux, got {sys.platform}. Start each process "
            "yourself, as `docs/clusters.md` shows."
        )
    environ = dict(os.environ if environ is None else environ)
    # Lines appear when they are printed, and are not lost in a crash.
    environ.setdefault("PYTHONUNBUFFERED", "1")
    if devices_per_process is not None:
        environ[FAKE_DEVICES] = str(devices_per_process)
    # What was ignored stays so: nohup ignores SIGHUP.
    heard = [n for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    with (
        lossy_output(),
        tempfile.TemporaryDirectory(prefix="replicator-launch-") as folder,
        contextlib.ExitStack() as held,
        signals_as_bytes(heard) as inbox,
        _Group(
            command,
            policy,
            environ | _share_secret(policy, environ, Path(folder)),
            Path(folder),
            inbox,
        ) as group,
    ):
        held.callback(os.close, hold_folder(folder))
        code = group.run()
        if loss := take_loss():
            _say(loss[0])
        return code


def _share_secret(
    policy: Policy, environ: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Put the run's secret where its processes read it, and say where that is.

    It is that of the environment, which may be of a larger group; otherwise a new one
    for several processes. What one process alone needs, it finds or has not.
    """
    secret = Secret.from_environment(environ)
    if secret is None and policy.processes > 1:
        secret = Secret.generate()
    if secret is None:
        return {}
    secret.write(folder / "secret")
    return {FILE_VARIABLE: str(folder / "secret")}


class _Group:
    def __init__(
        self,
        command: Sequence[str],
        policy: Policy,
        environ: Mapping[str, str],
        folder: Path,
        inbox: socket.socket,
    ) -> None:
        self._command = command
        self._policy = policy
        self._environ = environ
        self._folder = folder
        self._inbox = inbox
        self._clock: Clock = SystemClock()
        self._members: dict[str, Member] = {}
        self._finish: Finish | None = None
        self._state, self._actions = begin(
            [policy.unit], self._clock.now_s(), patience=policy.patience
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)

    def __enter__(self) -> "_Group":
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing behind, also after an error of our own."""
        until_s = self._clock.now_s() + _CLEANING_S
        # By their lifelines, as guards sweep best; by force only what is left then.
        for member in self._members.values():
            member.kill(hard=False)
        while self._members and self._clock.now_s() < until_s:
            for member in self._wait_for_exits(until_s):
                self._take_out(member)
        for member in self._members.values():
            member.kill(hard=True)
        self._selector.close()

    def run(self) -> int:
        """Go on until the supervisor says that it is over; return the exit code."""
        self._perform(self._actions)
        while self._finish is None:
            exited = self._wait_for_exits(next_deadline_s(self._state))
            # The wish first: exits seen in the same round then count as leaving, not as
            # a failure that starts all again.
            for number in self._read_signals():
                self._handle(stop_asked(number))
            for member in exited:
                self._handle_exit(member)
            deadline_s = next_deadline_s(self._state)
            if deadline_s is not None and self._clock.now_s() >= deadline_s:
                self._handle(TimeUp())
        if self._finish.failure is not None:
            _show(self._finish.failure)
        return exit_code(self._state, self._finish)

    def _wait_for_exits(self, until_s: float | None) -> list[Member]:
        """Pass on output until something else happens; return who has exited."""
        left_s = None if until_s is None else max(0.0, until_s - self._clock.now_s())
        exited = []
        for key, _ in self._selector.select(left_s):
            if isinstance(key.data, LabelledLines):
                if not key.data.pump():
                    self._selector.unregister(key.fd)
            elif isinstance(key.data, Member):
                exited.append(key.data)
        return exited

    def _read_signals(self) -> Iterator[int]:
        with contextlib.suppress(BlockingIOError):
            yield from self._inbox.recv(1024)

    def _handle_exit(self, member: Member) -> None:
        code = self._take_out(member)
        end = ProcessEnd(member.rank, code, member.err.last_words())
        event = ended(
            end,
            self._state,
            hung_grace_s=self._policy.hung_grace_s,
            safe_step=self._progress(),
            out_of_memory=count_memory_kills() > member.memory_kills,
        )
        self._handle(event)

    def _take_out(self, member: Member) -> int:
        for descriptor in (member.out.descriptor, member.err.descriptor, member.exited):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        del self._members[process_name(member.rank)]
        return member.reap()

    def _progress(self) -> int | None:
        steps = map(read_progress, self._folder.glob("progress-*[0-9]"))
        return max((step for step in steps if step is not None), default=None)

    def _handle(self, event: Event) -> None:
        self._state, actions = decide(self._state, event, self._clock.now_s())
        self._perform(actions)

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action.attempt)
                case Stop():
                    number = signal_asked(self._state.stopped_by)
                    assert number is not None, "only a signal asks for a stop"
                    for name in action.names:
                        self._members[name].tell(number)
                case Kill():
                    for name in action.names:
                        self._members[name].kill(hard=action.hard)
                case Say():
                    _say(action.message)
                case Finish():
                    self._finish = action

    def _start(self, attempt: int) -> None:
        port = free_port()
        for rank in range(self._policy.processes):
            environ = {
                **self._environ,
                **self._group_variables(rank, port),
                "REPLICATOR_ATTEMPT": str(attempt),
                VARIABLE: str(self._folder / f"progress-{rank}"),
            }
            self._members[process_name(rank)] = member = Member(
                rank,
                self._command,
                environ=environ,
                folder=self._folder,
                out=sys.stdout.buffer,
                err=sys.stderr.buffer,
            )
            for lines in (member.out, member.err):
                self._selector.register(lines.descriptor, selectors.EVENT_READ, lines)
            self._selector.register(member.exited, selectors.EVENT_READ, member)

    def _group_variables(self, rank: int, port: int) -> dict[str, str]:
        """Return what the processes meet by; another port in each attempt.

        One process alone is no group here. It may be one of a larger group, which it
        finds as it would without a launcher.
        """
        if self._policy.processes == 1:
            return {}
        return as_environment(
            Cluster(
                kind="replicator",
                coordinator=f"127.0.0.1:{port}",
                num_processes=self._policy.processes,
                process_id=rank,
            )
        )


def _show(failure: Ended) -> None:
    """Print the first failure's last lines again: thousands may have followed."""
    how = failure.text.removeprefix(f"{failure.name} ")
    _say(
        f"the first failure was {failure.name} in attempt {failure.attempt}: it {how}. "
        "Its last lines:"
    )
    end: ProcessEnd = failure.exited
    for line in end.last_lines:
        sys.stderr.buffer.write(f"[{end.rank}] ".encode() + line + b"\n")
    sys.stderr.buffer.flush()


def _say(message: str) -> None:
    sys.stderr.buffer.write(f"[launch] {message}\n".encode())
    sys.stderr.buffer.flush()
