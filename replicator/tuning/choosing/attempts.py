"""Keep on disk which strategy is being tried, for the case that it ends the process."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Sequence

import jax

from replicator.base.host.compilation_cache import private_directory
from replicator.strategies.choose import Candidate
from replicator.strategies.machine import Machine
from replicator.strategies.strategy import parameters_of
from replicator.tuning.choosing.candidates import Work


class Attempts:
    """Names of strategies that ended a process with this step, on this machine.

    Attributes:
      ended: Their names.
      file: File that has them; None if nothing is kept.

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
        name = hashlib.sha256(text.encode()).hexdigest()[:16] + ".json"
        self.file = None if directory is None else directory / name
        self.ended = self._read()

    @contextlib.contextmanager
    def noted(self, name: str | None) -> Iterator[None]:
        """Have a name on disk as long as a `with` block lasts, however it ends."""
        self._write({*self.ended, name or ""})
        try:
            yield
        finally:
            self._write(self.ended)

    def _read(self) -> set[str]:
        if self.file is None:
            return set()
        try:
            return set(json.loads(self.file.read_text()))
        except (OSError, ValueError, TypeError):
            return set()

    def _write(self, names: set[str]) -> None:
        if self.file is None:
            return
        with contextlib.suppress(OSError):  # as the note that is missing costs little
            if names:
                self.file.write_text(json.dumps(sorted(names)))
            else:
                self.file.unlink(missing_ok=True)


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
