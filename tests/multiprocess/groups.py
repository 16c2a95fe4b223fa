"""Start a group of processes that know each other, and let none of them outlive a test.

Each has a process group of its own, and asks the kernel to be killed with its test.
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from replicator.distributed.processes.ports import free_port

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass
class Member:
    """One process; what it says is collected by threads, so no pipe fills up."""

    process: subprocess.Popen
    out: list[str] = dataclasses.field(default_factory=list)
    err: list[str] = dataclasses.field(default_factory=list)
    said: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def listen(self):
        """Begin to collect what it says."""
        pairs = [(self.process.stdout, self.out), (self.process.stderr, self.err)]
        self._threads = [
            threading.Thread(target=self._collect, args=pair) for pair in pairs
        ]
        for thread in self._threads:
            thread.start()
        return self

    def wait_for(self, line, timeout_s=300):
        """Wait until it has printed a line."""
        with self.said:
            heard = self.said.wait_for(
                lambda: line in self.out or self.process.poll() is not None, timeout_s
            )
        assert heard, self.report()
        assert line in self.out, self.report()

    def wait(self, timeout_s=300):
        """Wait for its end; return its code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report()) from None
        for thread in self._threads:
            thread.join(timeout_s)
        return code

    def report(self):
        """Return what it has said so far."""
        return "\n".join([*self.out[-20:], *self.err[-60:]])

    def _collect(self, stream, lines):
        for line in stream:
            with self.said:
                lines.append(line.rstrip("\n"))
                self.said.notify_all()
        with self.said:
            self.said.notify_all()


@contextlib.contextmanager
def group(arguments_of, count=2):
    """Start `python -m *arguments_of(rank, port)` for each rank, and kill them."""
    port, members = free_port(), []
    try:
        for rank in range(count):
            members.append(start(arguments_of(rank, port)))
        yield members
    finally:
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.wait()
            member.process.stdout.close()
            member.process.stderr.close()


def start(arguments, **options):
    """Start `python -m *arguments` in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    return Member(process).listen()


@contextlib.contextmanager
def at_most(seconds):
    """Fail if what happens inside takes longer."""
    began_s = time.monotonic()
    yield
    took_s = time.monotonic() - began_s
    assert took_s <= seconds, f"it took {took_s:.1f} s, and may take {seconds} s"


def die_with_parent():
    """Ask, in a process that was started here, to be killed when the test's dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
