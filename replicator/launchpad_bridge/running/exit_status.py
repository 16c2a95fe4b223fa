"""Exit status of a script whose program failed: non-zero, even if it did not wait.

This module lists all runs of this process, for signals (`interrupts`) and `lp.stop()`.

A script that only calls `lp.launch(program)` goes on until the program has ended: the
hook below waits for it where Python waits for threads, before pools of threads close.
Python has no way to change the exit status from there on, so an object is left in a
place that Python clears last: its deletion ends the process, after all else has been
closed and flushed.
"""

import concurrent.futures.thread  # noqa: F401  # its own hook must run after ours
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Protocol

from replicator.base.host.standard_streams import flush_output, lossy

_KEPT_AT = "_replicator_exit_status"
# Called by Python between a script's end and the hooks of `threading`.
_SHUTDOWN = getattr(getattr(threading, "_shutdown", None), "__code__", None)
# Guards `_unseen`, `_is_prepared` and changes of `_runs`; readers of `_runs` copy it,
# as a signal handler may have interrupted the lock's holder. It is not held while a run
# is stopped or awaited. Re-entrant: a failure that is raised in a test is noted as seen
# in a signal handler, too.
_LOCK = threading.RLock()
_runs: "list[LiveRun]" = []
_unseen: dict[str, BaseException] = {}
_is_prepared = False
_is_exiting = False


class LiveRun(Protocol):
    """Part of `run.Run` that this module uses; `run` imports this one."""

    @property
    def run_id(self) -> str:
        """Return the unique id of the run."""
        ...

    @property
    def program(self) -> str:
        """Return the program's name."""
        ...

    def stop(self) -> None:
        """Ask it to stop."""

    def interrupt(self, signum: int) -> None:
        """Note a signal and ask the run to stop; called in a signal handler."""

    def wait_end(self) -> None:
        """Wait until it is over, whatever its outcome."""

    def signal_status(self) -> int:
        """Return the exit status for the signal that ended it; 0 for none."""
        ...


def live_runs() -> "list[LiveRun]":
    """Return the runs of this process that are not over."""
    return list(_runs)


def is_exiting(frame: FrameType | None) -> bool:
    """Return whether the script has come to its end, and waits for its programs.

    Args:
      frame: Frame of the main thread. Between the script's last line and our hook it is
        in Python's own code, and an error that is raised there is lost.
    """
    while frame is not None and not _is_exiting:
        if frame.f_code is _SHUTDOWN:
            return True
        frame = frame.f_back
    return _is_exiting


def keep_alive(run: LiveRun) -> None:
    """Make the script wait, at its end, until this run is over."""
    global _is_prepared
    with _LOCK:
        _runs.append(run)
        if not _is_prepared:
            _is_prepared = True
            os.register_at_fork(after_in_child=_forget)
            # The public `atexit` is too late: pools refuse work before it runs.
            getattr(threading, "_register_atexit", lambda hook: None)(_at_exit)
            _chain_excepthook()


def let_go(run: LiveRun) -> None:
    """Forget a run that is over."""
    with _LOCK:
        _runs.remove(run)


def wait_for_runs() -> None:
    """Wait for the programs of a script that has ended, while threads can still start.

    From Python 3.12 on none can where `keep_alive` waits.
    """
    global _is_exiting
    _is_exiting = True
    for run in list(_runs):
        run.wait_end()


def note_failure(run_id: str, error: BaseException) -> None:
    """Keep the failure of a run until it is raised or read somewhere."""
    with _LOCK:
        _unseen[run_id] = error


def seen(run_id: str) -> None:
    """Forget the failure of a run: it was raised where code could handle it."""
    with _LOCK:
        _unseen.pop(run_id, None)


def _forget() -> None:
    """Forget the parent's runs, in a process that it forked."""
    global _is_exiting, _LOCK
    # A thread of the parent that may have held the old one is not in this process.
    _LOCK = threading.RLock()
    _runs.clear()
    _unseen.clear()
    _is_exiting = False


def _at_exit() -> None:
    global _is_exiting
    _is_exiting = True
    status = 0
    for run in list(_runs):
        if hasattr(sys, "ps1"):  # leaving a prompt or a notebook ends its programs
            run.stop()
        run.wait_end()
        status = status or run.signal_status()
    for error in list(_unseen.values()):
        traceback.print_exception(error, file=lossy(sys.stderr))
        status = 1
    if status:
        _leave_with(status)


def _leave_with(status: int) -> None:
    if multiprocessing.parent_process() is not None:
        # Such a child ends by `os._exit` with a status of its own; nothing comes after.
        flush_output()
        os._exit(status)
    setattr(sys, _KEPT_AT, _ExitWhenDeleted(status))


class _ExitWhenDeleted:
    """Ends the process when it is deleted, which is when Python itself ends."""

    def __init__(self, status: int, leave: Callable[[int], None] = os._exit) -> None:
        self._status = status
        self._leave = leave

    def __del__(self) -> None:
        self._leave(self._status)


def _chain_excepthook() -> None:
    """Make an error that ends the script stop its programs first."""
    before = sys.excepthook

    def stop_runs(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        for run in list(_runs):
            run.stop()
        before(kind, error, trace)

    sys.excepthook = stop_runs
