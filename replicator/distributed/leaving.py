"""Make a process whose program failed exit at once, without waiting for the others.

JAX's exit handler waits at a barrier until every process exits, up to five minutes. But
the others wait for this one inside a collective: the group hangs, and its supervisor (a
launcher, a scheduler) sees no exit. So after an uncaught exception the
barrier is skipped. A program that ends well still waits there for the others.
"""

import atexit
import logging
import multiprocessing
import os
import sys
from types import TracebackType

from replicator.base.host.standard_streams import flush_output

_exit_code: int | None = None
_watches = False


def leave_at_once_after_an_exception() -> None:
    """Watch for an uncaught exception; after one, exit without JAX's barrier."""
    global _watches
    if _watches:
        return
    _watches = True
    shown = sys.excepthook

    def note(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        global _exit_code
        _exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        shown(kind, error, traceback)

    sys.excepthook = note
    # Runs before JAX's handler, which was registered when JAX was imported.
    atexit.register(_leave)


def leave_at_once(code: int) -> None:
    """Make this process exit with `code`, without JAX's barrier, when it exits."""
    global _exit_code
    _exit_code = code


def _leave() -> None:
    if _exit_code is None:
        return
    # The work of handlers of the standard library, which are now skipped.
    for child in multiprocessing.active_children():
        child.terminate()
    logging.shutdown()
    flush_output()
    os._exit(_exit_code)
