"""Run one worker in a process of its own, and report its end to the launcher.

The node runs in the main thread. A second thread waits for requests to stop: from the
launcher, or by SIGTERM, which is the same for the node, while the run learns that the
worker is preempted. A signal handler must not touch an event (it may have interrupted
the thread that holds its lock), so it writes to a socket.

Requests of the launcher arrive at one descriptor, reports leave by another: in a fork
both are one socket. An interpreter behind a command has its standard input and the
former standard output: a shell has put the log there before Python starts, so output of
the start is not taken for a report.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from replicator.base.host.standard_streams import flush_output, lossy
from replicator.launchpad_bridge.addresses.address_books import (
    Book,
    RegistryOfParent,
)
from replicator.launchpad_bridge.launchers import worker_reports
from replicator.launchpad_bridge.launchers.launcher_environment import (
    LauncherEnvironment,
    apply_settings,
)
from replicator.launchpad_bridge.recipes import unpack
from replicator.launchpad_bridge.running.stop_event import StopEvent

_LAUNCHER_GONE = 70
_SHOWN_THREADS = 8
_START = """
import json, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["surroundings"]["path"]
from replicator.launchpad_bridge.launchers.worker_process import main
sys.exit(main(task))
"""
_REPORTS = 3
_WITH_REPORTS_APART = f'exec "$@" {_REPORTS}>&1 1>&2'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Task of a worker.

    Attributes:
      program: Name of the program.
      worker: Name of the worker.
      launch_type: Name of the launcher.
      recipe: File with the pickled function, which the launcher wrote.
      attempt: Number of this start of the worker, from 0.
      environment: Variables of its own; JAX's settings of the same names win over the
        launcher's.
      orders: Descriptor at which requests of the launcher arrive; standard input by
        default.
      reports: Descriptor for reports; the third after standard input by default.
      book: Options of its address book: `registry`, an address on this host, `folder`
        of the run and `host`; None if there are no other hosts.
    """

    program: str
    worker: str
    launch_type: str
    recipe: str
    attempt: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    orders: int = 0
    reports: int = _REPORTS
    book: Mapping[str, str] | None = None


def interpreter_flags() -> list[str]:
    """Return this interpreter's options, as `multiprocessing` hands them on."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]


def fresh_interpreter(
    job: Job, surroundings: LauncherEnvironment, own_environment: Collection[str]
) -> list[str]:
    """Return the command line that runs a job in a fresh interpreter.

    Args:
      job: Task of the worker.
      surroundings: Environment of the launcher.
      own_environment: Names of variables that the worker has of its own.
    """
    task = {
        "job": dataclasses.asdict(job),
        "surroundings": dataclasses.asdict(surroundings),
        "own_environment": sorted(own_environment),
    }
    # -P: the folder of a program is no place to import from.
    return [sys.executable, *interpreter_flags(), "-P", "-c", _START, json.dumps(task)]


def piped_interpreter(
    job: Job, surroundings: LauncherEnvironment, own_environment: Collection[str]
) -> list[str]:
    """Return the same as `fresh_interpreter`, for a launcher that has two pipes."""
    command = fresh_interpreter(job, surroundings, own_environment)
    return ["/bin/sh", "-c", _WITH_REPORTS_APART, "sh", *command]


def main(task: Mapping[str, Any]) -> int:
    """Run a job in an interpreter that was started for it.

    Args:
      task: `job`, `surroundings` and `own_environment`, as plain values.

    Returns:
      The code to exit with.
    """
    job = Job(**task["job"])
    if job.orders == 0:
        job = _with_streams_of_its_own(job)
    surroundings = LauncherEnvironment(**task["surroundings"])
    if surroundings.jax_settings:
        import jax  # noqa: F401  # its settings are not kept anywhere else
    surroundings.take_on(task["own_environment"])
    return run_job(job)


def run_job(job: Job) -> int:
    """Run a job in this process, which is a worker and nothing else.

    Returns:
      The code to exit with: 0 if the node returned.
    """
    # A crash in foreign code leaves its stacks in the log.
    faulthandler.enable()
    # Lines are seen when they are printed, and are not lost in a crash.
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
    # JAX may have been imported before this process had the variables.
    apply_settings({name.lower(): value for name, value in job.environment.items()})
    _draw_other_numbers()
    with _Listener(job.orders) as listener:
        return _run(_Context(job, listener), job)


def _with_streams_of_its_own(job: Job) -> Job:
    """Keep input and reports for the launcher: the node has no input, and its log."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)  # what ends this worker ends what it started, and no more
    # Duplicates, which no command that the node starts inherits.
    given = job.reports
    job = dataclasses.replace(job, orders=os.dup(0), reports=os.dup(given))
    os.close(given)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return job


def _run(context: "_Context", job: Job) -> int:
    try:
        executable = unpack(Path(job.recipe))
        result = executable.run(context)
    except SystemExit as error:
        if error.code in (None, 0):
            context.report(worker_reports.pack_result(None, context.good_end()))
            return 0
        return _raised(context, error)
    except BaseException as error:
        return _raised(context, error)
    with _flushed():
        context.report(worker_reports.pack_result(result, context.good_end()))
    _name_threads_that_stay()
    return 0


def _raised(context: "_Context", error: BaseException) -> int:
    with _flushed():
        # The last lines are those printed before; the traceback travels in the report.
        context.report(worker_reports.pack_error(error, log_bytes=_printed_bytes()))
        with contextlib.suppress(OSError, ValueError):  # it has closed this stream
            traceback.print_exception(error)
    return 1


def _printed_bytes() -> int:
    try:
        return os.fstat(2).st_size
    except OSError:  # the node has closed it
        return 0


class _Context:
    """A `NodeContext`."""

    def __init__(self, job: Job, listener: "_Listener") -> None:
        self.program = job.program
        self.worker = job.worker
        self.launch_type = job.launch_type
        self.attempt = job.attempt
        self.stop_event = listener.stop_event
        self._listener = listener
        self._reports = job.reports
        # Held while a report is written, so that reports of the main thread and of one
        # that asks for a stop do not mix. No other lock is taken while it is held.
        # Not re-entrant: a signal handler must not report.
        self._sending = threading.Lock()
        # Called in the thread that sets it, the listener's: not in a signal handler.
        listener.stop_event.when_set(self._ask_unit)
        self.address_book = None if job.book is None else _open_book(job.book)

    def stop_program(self) -> None:
        self.report(worker_reports.ASK_PROGRAM_TO_STOP)

    def _ask_unit(self) -> None:
        if self._listener.is_preempted:
            self.report(worker_reports.ASK_UNIT_TO_STOP)

    def good_end(self) -> worker_reports.GoodEnd:
        if not self.stop_event.is_set():
            return "returned"
        return "preempted" if self._listener.is_preempted else "stopped"

    def report(self, report: bytes) -> None:
        # If the launcher is gone, the kernel ends this process soon.
        # It may wait until the launcher has read: a long result does not fit the pipe.
        with self._sending, contextlib.suppress(OSError):
            left = memoryview(report)
            while left:
                left = left[os.write(self._reports, left) :]


class _Listener:
    """A thread that sets `stop_event` when the launcher or a signal asks for it.

    Args:
      orders: Descriptor at which requests of the launcher arrive.

    Attributes:
      stop_event: Stop event of the node.
      is_preempted: Whether a signal came before the launcher's request.
    """

    def __init__(self, orders: int) -> None:
        self.stop_event = StopEvent()
        self._pid = os.getpid()
        self.is_preempted = False  # set before the event is, and not again
        self._inbox, self._outbox = socket.socketpair()
        # A handler must not wait: a byte that has no room is one of many then.
        self._outbox.setblocking(False)
        # The main thread's until `_thread` starts, then that one's.
        # No epoll: a command may hand on a file as the worker's input.
        self._selector = selectors.PollSelector()
        for source in (orders, self._inbox.fileno()):
            self._selector.register(source, selectors.EVENT_READ)
        # `__exit__` ends it by a byte on the socket and joins it. A daemon, as a node
        # that ends by `os._exit` or a crash never comes there.
        self._thread = threading.Thread(target=self._listen, daemon=True, name="stop")

    def __enter__(self) -> "_Listener":
        signal.signal(signal.SIGTERM, self._on_signal)
        # A request that was sent before this process was there.
        self._obey_next(0.0)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):
            self._outbox.send(b"x")
        # It ends with that byte. Nobody waits for the stop event any more.
        self._thread.join()
        # Before the sockets are closed: the handler writes to one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._selector.close()
        self._inbox.close()
        self._outbox.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Runs in the main thread, once that is back in Python.
        # A second one is obeyed by the kernel.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a child that the node forked: its own end
            os.kill(os.getpid(), number)
            return
        with contextlib.suppress(OSError):
            self._outbox.send(worker_reports.STOP)

    def _listen(self) -> None:
        while self._obey_next(None):
            pass

    def _obey_next(self, timeout_s: float | None) -> bool:
        """Obey what has arrived in time; return whether to go on."""
        ready = self._selector.select(timeout_s)
        return all([self._obey(key.fd) for key, _ in ready])

    def _obey(self, source: int) -> bool:
        try:
            data = os.read(source, 16)
        except ConnectionError:
            data = b""
        if worker_reports.STOP in data and not self.stop_event.is_set():
            self.is_preempted = source == self._inbox.fileno()
            self.stop_event.set()
        # The end of the launcher's stream: it is dead, or wants this worker dead.
        if not data:
            _end_without_launcher()
        return b"x" not in data


def _open_book(options: Mapping[str, str]) -> Book:
    registry = RegistryOfParent(options["registry"])
    return Book(registry, folder=Path(options["folder"]), host=options["host"])


def _end_without_launcher() -> None:
    """End at once, with all that this worker started: its launcher is gone."""
    # No clean-up, which a node that hangs would hold up: the guard, or the fork server,
    # sweeps what has left this group.
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(_LAUNCHER_GONE)


def _draw_other_numbers() -> None:
    """Give NumPy's global generator a state that other forks do not have."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    flush_output()
    yield
    flush_output()


def _name_threads_that_stay() -> None:
    """Print which threads keep this process: Python waits for all but daemons."""
    staying = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]
    if staying:
        shown = ", ".join(staying[:_SHOWN_THREADS])
        print(f"The node has returned; its threads still run: {shown}", file=sys.stderr)
