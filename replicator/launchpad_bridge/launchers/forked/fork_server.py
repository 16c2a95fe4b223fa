"""A process of one thread that turns itself into workers, and watches them.

It imports what the script has imported, then forks a worker for each `start` that the
launcher sends: milliseconds instead of seconds. It is the parent of all workers, so it
learns of each death at once, and the kernel kills them when it dies itself. Where a
fork would not be safe, or a fresh interpreter is wanted, the fork turns itself into one
(`exec`): all else is the same.

    launcher ── start, kill ──> fork server
    launcher <── ready or unfit, started, exited ── fork server

A dead worker's descendants die with it: those of its session, and those that carry its
mark in their environment. What hides from both dies when the run is over, by the guard
above this process: if that was killed by SIGKILL, it goes on.
"""

import contextlib
import dataclasses
import gc
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from replicator.base.host.standard_streams import say_raw
from replicator.distributed.processes import guard
from replicator.distributed.processes.exits import count_memory_kills
from replicator.distributed.processes.signals import signals_as_bytes
from replicator.distributed.processes.sweep import MARK, kill_session
from replicator.launchpad_bridge.launchers.forked.control_frames import (
    Message,
    Receiver,
    frame,
    send,
)
from replicator.launchpad_bridge.launchers.forked.preloading import preload
from replicator.launchpad_bridge.launchers.launcher_environment import (
    LauncherEnvironment,
)
from replicator.launchpad_bridge.launchers.worker_logs import open_log
from replicator.launchpad_bridge.launchers.worker_process import (
    Job,
    fresh_interpreter,
    run_job,
)


def main(control: int) -> int:
    """Serve until the launcher is gone; in a worker, run it and return its code.

    Args:
      control: The socket to the launcher, as a descriptor.
    """
    # Workers have no use for it, and may not read from it by mistake.
    own = os.dup(control)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, control)
    os.close(nothing)
    with socket.socket(fileno=own) as to_launcher:
        receiver = Receiver(to_launcher)
        order = receiver.receive_one()
        if order is None:
            return 0
        reason = _prepare(order)
        try:
            send(to_launcher, {"unfit": reason} if reason else {"ready": os.getpid()})
        except OSError:  # the launcher is gone
            return 0
        job = None if reason else _Server(to_launcher, receiver, order).serve()
    return 0 if job is None else run_job(job)


def _prepare(order: Message) -> str | None:
    """Import; return why this process must not be forked, or None."""
    guard.adopt_orphans()
    if not order["forks"]:
        gc.enable()
        return None
    reason = preload(order["modules"])
    if reason is not None:
        return reason
    LauncherEnvironment(**order["surroundings"]).take_on(order["own_environment"])
    return None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Child:
    """A worker that lives.

    Attributes:
      id: Its number in messages of the launcher.
      mark: Mark in the environment of its descendants.
      memory_kills: Number of times the kernel had killed for memory when it started.
      is_killed: Whether the launcher asked to kill it.
    """

    id: int
    mark: str
    memory_kills: int
    is_killed: bool = False


class _Server:
    def __init__(
        self, control: socket.socket, receiver: Receiver, order: Message
    ) -> None:
        self._control = control
        self._receiver = receiver
        self._order = order
        # Messages, whole and in order, that the socket had no room for.
        self._unsent = bytearray()
        # By process id. An id stays a worker's until `_reap` has waited for it.
        self._children: dict[int, _Child] = {}
        # Of workers that have ended while orphans of some worker are still here.
        self._dead_sessions: set[int] = set()
        self._dead_marks: set[str] = set()
        # All of this is the one thread's; `_leave` closes it in a fork.
        self._selector = selectors.DefaultSelector()
        self._signals = signals_as_bytes([signal.SIGCHLD])

    def serve(self) -> Job | None:
        """Start and watch workers; return None at the end, in a worker its job."""
        # A launcher may ignore it, and this is inherited, by workers too: no byte would
        # come for a dead child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        inbox = self._signals.__enter__()
        self._selector.register(inbox, selectors.EVENT_READ)
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj: events for key, events in self._selector.select()}
            if inbox in ready:
                # A full buffer loses nothing: one byte makes `_reap` look at all.
                with contextlib.suppress(BlockingIOError):
                    inbox.recv(4096)
                self._reap()
            events = ready.get(self._control, 0)
            if events & selectors.EVENT_WRITE:
                self._send_rest()
            if events & selectors.EVENT_READ:
                messages = self._receiver.receive()
                if messages is None:
                    return None
                for message in messages:
                    job = self._obey(message)
                    if job is not None:
                        return job

    def _obey(self, message: Message) -> Job | None:
        if "start" in message:
            return self._start(message["start"], self._receiver.take_descriptor())
        # Not reaped yet, so each id is still that worker's.
        for pid, child in self._children.items():
            if child.id == message["kill"]:
                child.is_killed = True
                _kill_session(pid)
        return None

    def _start(self, order: Message, channel: int) -> Job | None:
        """Fork; return None here, and the job in the worker."""
        mark = f"{os.environ[MARK]}{order['id']}"
        child = _Child(id=order["id"], mark=mark, memory_kills=count_memory_kills())
        server = os.getpid()
        try:
            # One thread, so no lock is held by another. The child inherits the modules,
            # the channel and the server's own sockets; `_leave` closes these.
            # Where an import has started a thread, `preload` has refused to fork.
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            os.close(channel)
            self._send({"failed": order["id"], "reason": str(error)})
            return None
        if pid:
            # Only the worker, and what it forks, has a copy now: the launcher reads the
            # end when they die.
            os.close(channel)
            self._children[pid] = child
            # The kernel gives ids out again: this one leads a living session now.
            self._dead_sessions.discard(pid)
            self._send({"started": order["id"], "pid": pid})
            return None
        # If this server dies, by SIGKILL even, the kernel kills the worker.
        guard.die_with(server)
        self._leave()
        job = Job(**{**order["job"], "orders": channel, "reports": channel})
        _settle(job, order, mark)
        if not self._order["forks"]:
            _become_fresh(job, self._order)
        return job

    def _leave(self) -> None:
        """Forget, in a worker, that it was the server."""
        # A session of its own: whatever it starts is found, and killed, by it.
        os.setsid()
        # Puts SIGCHLD and the wake-up socket back as they were before `serve`.
        self._signals.__exit__(None, None, None)
        self._selector.close()
        # Channels of workers yet to be started: a copy here would hide their deaths.
        self._receiver.close_descriptors()
        # A copy here would hide the server's death from the launcher.
        self._control.close()

    def _send(self, message: Message) -> None:
        self._unsent += frame(message)
        self._send_rest()

    def _send_rest(self) -> None:
        """Send what there is room for."""
        # The launcher may be sending, and reads later: if this process waited until it
        # does, each would wait for the other.
        try:
            sent = self._control.send(self._unsent, socket.MSG_DONTWAIT)
            del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the launcher is gone: the next read finds the end
            self._unsent.clear()
        writes = selectors.EVENT_WRITE if self._unsent else 0
        self._selector.modify(self._control, selectors.EVENT_READ | writes)

    def _reap(self) -> None:
        """Reap the workers that have ended, and end all that they leave behind."""
        while (pid := _peek_ended()) is not None:
            child = self._children.pop(pid, None)
            if child is not None:
                # Before its id is given back: nobody else's session can bear it yet.
                _kill_session(pid)
            _, status = os.waitpid(pid, 0)
            if child is None:  # an orphan that this process had adopted
                continue
            self._dead_sessions.add(pid)
            self._dead_marks.add(child.mark)
            self._send(
                {
                    "exited": child.id,
                    "code": os.waitstatus_to_exitcode(status),
                    "is_killed": child.is_killed,
                    "out_of_memory": count_memory_kills() > child.memory_kills,
                }
            )
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill what dead workers had started and this process has adopted."""
        adopted = [pid for pid in guard.children() if pid not in self._children]
        for pid in adopted:
            if self._is_left_by_dead(pid):
                # Not reaped yet, so the id is still its own. Its children come here.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        # What descends from a dead worker is below an adopted process, so gone.
        if not adopted:
            self._dead_sessions.clear()
            self._dead_marks.clear()

    def _is_left_by_dead(self, pid: int) -> bool:
        try:
            if os.getsid(pid) in self._dead_sessions:
                return True
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return any(
            f"{MARK}={mark}".encode() in environment for mark in self._dead_marks
        )


def _peek_ended() -> int | None:
    """Return the id of a child that has ended, and leave it a zombie."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if ended is None else ended.si_pid


def _kill_session(pid: int) -> None:
    kill_session(pid)
    # A fork that has not yet called `setsid` has no group of its own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _settle(job: Job, order: Message, mark: str) -> None:
    """Become, after a fork, the worker that was ordered."""
    os.environ.update(job.environment)
    # All that it starts inherits this, whatever session it makes for itself.
    os.environ[MARK] = mark
    log = open_log(order["log"])
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    guard.name_process(job.worker)
    if order["cores"]:
        os.sched_setaffinity(0, order["cores"])


def _become_fresh(job: Job, order: Message) -> NoReturn:
    """Replace this fork by an interpreter that has imported nothing."""
    # The interpreter gets the channel, 0 to 2, the session, the environment and the
    # cores; Python's other descriptors close on `exec`.
    os.set_inheritable(job.orders, True)
    surroundings = LauncherEnvironment(**order["surroundings"])
    command = fresh_interpreter(job, surroundings, order["own_environment"])
    try:
        os.execv(sys.executable, command)
    except OSError as error:
        say_raw(f"{sys.executable} cannot be run: {error}\n")
        os._exit(127)
