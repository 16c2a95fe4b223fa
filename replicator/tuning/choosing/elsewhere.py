"""Measure in a process of its own, which may die: on fake devices of a CPU.

    here ── about it, as JSON; the subject, pickled; questions ──> its standard input
    here <── an answer to each, as JSON ────────────────────────── its standard output

XLA ends its process where it cannot go on, and a host without memory does. Here this
fails one candidate: the next question starts another process. A guard ends it with this
process.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable
from typing import IO, Any

import jax
from jax.sharding import Mesh

from replicator.distributed.child import (
    how_it_ended,
    import_path,
    pickled,
    send,
    started_child,
)
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.engine.memory import MemoryNeed
from replicator.strategies.choose import CandidateFailed, Checked, NoTimeLeft, Timed
from replicator.strategies.strategy import Strategy
from replicator.strategies.text import to_json
from replicator.tuning.choosing import process
from replicator.tuning.choosing.candidates import Work
from replicator.tuning.choosing.measuring import CompiledStrategy, Measurer
from replicator.tuning.choosing.subject import Subject
from replicator.tuning.outcome import features_from


class ElsewhereMeasurer:
    """The methods of `Measurer`, in a process of its own; close it when done.

    Args:
      subject: The step.
      devices: Fake devices, as replicas.
      limit_s: Seconds that an answer may take.
      until_s: End of the time for all answers, by `time.monotonic`.

    Raises:
      Exception: The subject cannot be pickled, or the process cannot unpickle it.
    """

    def __init__(
        self, subject: Subject, devices: Mesh, *, limit_s: float, until_s: float
    ) -> None:
        self._here = Measurer(subject, devices)
        self._subject = pickled(subject.file or subject)
        self._count, self._limit_s = devices.size, limit_s
        self._child: tuple[GuardedProcess, IO[bytes]] | None = None
        self._ending = contextlib.ExitStack()
        self._strategies: dict[str, Strategy] = {}
        self._known: set[str] = set()  # compiled in the process that runs
        self._until_s = until_s
        begun = self._ask("begin", "")
        if isinstance(begun, CandidateFailed):
            self.close()
            raise ValueError(begun.why)

    def work(self) -> Work:
        """As `Measurer.work`: tracing needs no other process."""
        return self._here.work()

    def compile(
        self, name: str, strategy: Strategy, *, accumulate: int | None = None
    ) -> CompiledStrategy | CandidateFailed | NoTimeLeft:
        """As `Measurer.compile`; no method takes longer than there is time."""
        self._strategies[name] = strategy
        asked = {"strategy": to_json(strategy), "accumulate": accumulate}
        return self._ask("compile", name, **asked)

    def check(
        self, name: str, reference: str
    ) -> Checked | CandidateFailed | NoTimeLeft:
        """As `Measurer.check`."""
        return self._again(reference, name) or self._ask(
            "check", name, reference=reference
        )

    def time(self, name: str) -> Timed | CandidateFailed | NoTimeLeft:
        """As `Measurer.time`."""
        return self._again(name) or self._ask("time", name)

    def close(self) -> None:
        """End the process."""
        self._child = None
        self._known.clear()
        self._ending.close()

    def _again(self, *names: str) -> CandidateFailed | NoTimeLeft | None:
        """Compile again what a process that died had compiled."""
        for name in names:
            if name not in self._known:
                found = self.compile(name, self._strategies[name])
                if isinstance(found, NoTimeLeft):
                    return found
                if isinstance(found, CandidateFailed):
                    return CandidateFailed(name=names[-1], why=found.why)
        return None

    def _ask(self, verb: str, name: str, **asked: Any) -> Any:
        question = {"verb": verb, "name": name, **asked}
        until_s = min(time.monotonic() + self._limit_s, self._until_s)
        child, messages = self._child or self._started(until_s)
        send(child, json.dumps(question).encode() + b"\n", until_s)
        line = _line(child, until_s)
        if not line:
            why = f"no answer within {self._limit_s:g} s of `limit_s`"
            if time.monotonic() < until_s:
                why = how_it_ended(child, messages)
            self.close()
            if until_s == self._until_s <= time.monotonic():
                return NoTimeLeft()
            return CandidateFailed(name=name, why=why)
        answer = json.loads(line)
        kind = answer.pop("kind")
        if kind == "CandidateFailed":
            return CandidateFailed(name=name, why=answer["why"])
        if verb == "compile":
            self._known.add(name)
        return _ANSWERS[kind](answer)

    def _started(self, until_s: float) -> tuple[GuardedProcess, IO[bytes]]:
        self._child = self._ending.enter_context(
            started_child(process.__name__, {"JAX_PLATFORMS": "cpu"})
        )
        about = {
            "settings": {name: getattr(jax.config, name) for name in process.SETTINGS},
            "devices": self._count,
        }
        head = import_path() + json.dumps(about).encode() + b"\n"
        send(self._child[0], head + self._subject, until_s)
        return self._child


def _line(child: GuardedProcess, until_s: float) -> bytes:
    """Return the next line; nothing if it ends, or there is no time for it."""
    assert child.stdout is not None, "a pipe"
    poll, line = select.poll(), b""
    poll.register(child.stdout, select.POLLIN)
    while poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
        part = os.read(child.stdout.fileno(), 1 << 16)
        if not part:
            return b""
        line += part
        if line.endswith(b"\n"):
            return line
    return b""


def _compiled(answer: dict[str, Any]) -> CompiledStrategy:
    features, need = answer.pop("features"), answer.pop("need")
    return CompiledStrategy(
        need=None if need is None else MemoryNeed(**need),
        features=features_from(features),
        **answer,
    )


_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Begun": lambda answer: None,
    "CompiledStrategy": _compiled,
    "Checked": lambda answer: Checked(**answer),
    "Timed": lambda answer: Timed(**answer),
}
