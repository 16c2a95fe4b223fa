"""Start processes that a terminal's Ctrl-C does not reach, from their first instant on.

`start_new_session=True` alone leaves a gap: a fork belongs to the terminal until it
has called `setsid`, and a Ctrl-C within these microseconds kills it. So a terminal's
signals are blocked while a process starts, and it inherits that: one that came in the
gap waits until the new process has said what becomes of it.

Run as a program of its own, `own_session.py COMMAND…`, with the standard library only,
this file turns itself into a command that does not know of all that.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence

TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP)
"""What Ctrl-C, and a terminal that goes away, send to all that belong to it."""


@contextlib.contextmanager
def terminal_signals_blocked() -> Iterator[None]:
    """Block a terminal's signals in this thread, and in what it starts meanwhile.

    What is started has to unblock them: `guard.py` does, any other command through
    `in_new_session`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_new_session(command: Sequence[str]) -> list[str]:
    """Return a command that forgets the signals of the gap, then runs this one."""
    return [sys.executable, "-I", "-S", __file__, *command]


def main(words: list[str]) -> None:
    """Forget a terminal's signals, and be the command; does not return."""
    for number in TERMINAL_SIGNALS:
        before = signal.signal(number, signal.SIG_IGN)  # drops what waits
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        signal.signal(number, before)
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
