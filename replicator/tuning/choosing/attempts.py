"""Keep on disk which strategy is being tried, for the case that it ends the process."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import secrets
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import jax

from replicator.base.host.compilation_cache import private_directory
from replicator.strategies.choose import Candidate
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import parameters_of
from replicator.tuning.choosing.candidates import Work


class Attempts:
    """Names of strategies that ended a process with this step, on this machine.

    Each process has a file of its own, and a lock on it as long as it tries a strategy:
    the system ends the lock with the process.

    Attributes:
      ended: Their names.
      files: Pattern of the files that have them; None if nothing is kept.

    Args:
      work: Work of the step.
      machine: The machine.
      there: Whether another process tries them: then nothing is kept.
    """

    def __init__(self, work: Work, machine: Machine, *, there: bool = False) -> None:
        directory = None if there else private_directory("tried")
        about = [parameters_of(work.variables), work.examples, work.flops]
        where = [
            machine.name,
            machine.num_devices,
            jax.process_index(),
            jax.__version__,
        ]
        text = json.dumps([*about, *where])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.files = None if directory is None else directory / f"{name}.*"
        self.ended = self._read()

    @contextlib.contextmanager
    def noted(self, name: str | None) -> Iterator[None]:
        """Have a name on disk as long as a `with` block lasts, however it ends."""
        if self.files is None or name is None:
            yield
            return
        file = self.files.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
        with contextlib.ExitStack() as ending:
            # The note that is missing costs little.
            with contextlib.suppress(OSError):
                note = ending.enter_context(file.open("x"))
                ending.callback(file.unlink, missing_ok=True)
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
                note.write(name)
                note.flush()
            ending.enter_context(_forgotten_if_asked_to_stop(file))
            yield

    def _read(self) -> set[str]:
        found: set[str] = set()
        if self.files is None:
            return found
        for file in self.files.parent.glob(self.files.name):
            with contextlib.suppress(OSError, ValueError), file.open() as note:
                # Whoever holds the lock is still trying.
                fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
                found.add(note.read())
        return found - {""}


@contextlib.contextmanager
def _forgotten_if_asked_to_stop(file: Path) -> Iterator[None]:
    """Have SIGTERM delete a file before it ends the process, in a `with` block.

    It is the cluster that wants the machine then, and no fault of what is tried. While
    a compiler works, Python's handlers wait for it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> None:
        file.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def without_ended(
    candidates: Sequence[Candidate], ended: Collection[str]
) -> tuple[Candidate, ...]:
    """Return candidates, those that ended a process as failed; but all, if none stays.

    A process may also end for other reasons, and one candidate must be tried again.

    Args:
      candidates: All candidates.
      ended: Names of those that ended a process.
    """
    waiting = {each.name for each in candidates if each.status == "waiting"}
    if waiting <= set(ended):
        return tuple(candidates)
    why = "it ended the process that tried it last time"
    return tuple(
        dataclasses.replace(each, status="failed", why=why)
        if each.name in waiting and each.name in ended
        else each
        for each in candidates
    )
