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
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle
import jax
from jax.sharding import Mesh

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.engine.memory import MemoryNeed
from replicator.strategies.choose import Checked, Failed, Timed
from replicator.strategies.strategy import Strategy
from replicator.strategies.text import to_json
from replicator.tuning.choosing.candidates import Work
from replicator.tuning.choosing.measuring import CompiledStrategy, Measurer, Subject
from replicator.tuning.choosing.process import HANDED_ON
from replicator.tuning.outcome import features_from

_PROGRAM = (
    "import json, sys; "
    "sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from replicator.tuning.choosing.process import main; main()"
)
# Of a run of several processes, or for its devices: this one is none of them.
_NOT_HANDED_ON = {
    *("REPLICATOR_COORDINATOR", "REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"),
    "REPLICATOR_FAKE_DEVICES",
}
_LAST_LINES = 3
_FAKE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


class ElsewhereMeasurer:
    """The methods of `Measurer`, in a process of its own; close it when done.

    Args:
      subject: The step.
      devices: Fake devices, as replicas.
      limit_s: Seconds that an answer may take.

    Raises:
      Exception: The subject cannot be pickled.
    """

    def __init__(self, subject: Subject, devices: Mesh, *, limit_s: float) -> None:
        self._here = Measurer(subject, devices)
        self._subject = cloudpickle.dumps(subject)
        self._count, self._limit_s = devices.size, limit_s
        self._process: GuardedProcess | None = None
        self._messages: IO[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="replicator-measuring-"))
        self._strategies: dict[str, Strategy] = {}
        self._known: set[str] = set()  # compiled in the process that runs

    def work(self) -> Work:
        """As `Measurer.work`: tracing needs no other process."""
        return self._here.work()

    def compile(
        self, name: str, strategy: Strategy, *, accumulate: int | None = None
    ) -> CompiledStrategy | Failed:
        """As `Measurer.compile`."""
        self._strategies[name] = strategy
        asked = {"strategy": to_json(strategy), "accumulate": accumulate}
        return self._ask("compile", name, **asked)

    def check(self, name: str, reference: str) -> Checked | Failed:
        """As `Measurer.check`."""
        return self._again(reference, name) or self._ask(
            "check", name, reference=reference
        )

    def time(self, name: str) -> Timed | Failed:
        """As `Measurer.time`."""
        return self._again(name) or self._ask("time", name)

    def close(self) -> None:
        """End the process."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _again(self, *names: str) -> Failed | None:
        """Compile again what a process that died had compiled."""
        for name in names:
            if name not in self._known:
                found = self.compile(name, self._strategies[name])
                if isinstance(found, Failed):
                    return Failed(name=names[-1], why=found.why)
        return None

    def _ask(self, verb: str, name: str, **asked: Any) -> Any:
        question = json.dumps({"verb": verb, "name": name, **asked}).encode() + b"\n"
        until_s = time.monotonic() + self._limit_s
        process = self._started()
        line = b""
        with contextlib.suppress(BrokenPipeError):
            _write(process, question)
            line = _line(process, until_s)
        if not line:
            is_over = time.monotonic() >= until_s
            why = self._end()
            if is_over:
                why = f"no answer within {self._limit_s:g} s"
            return Failed(name=name, why=why)
        answer = json.loads(line)
        if verb == "compile" and answer["kind"] != "Failed":
            self._known.add(name)
        return _ANSWERS[answer.pop("kind")](answer)

    def _started(self) -> GuardedProcess:
        if self._process is not None:
            return self._process
        environ = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        environ["JAX_PLATFORMS"] = "cpu"
        environ["XLA_FLAGS"] = _FAKE_COUNT.sub("", environ.get("XLA_FLAGS", ""))
        self._messages = open(self._folder / "messages", "w+b")  # noqa: SIM115
        self._process = GuardedProcess(
            [sys.executable, "-P", "-c", _PROGRAM],
            owner=self._folder.name,
            environ=environ,
            folder=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
        )
        about = {
            "settings": {n: getattr(jax.config, n) for n in HANDED_ON if _has(n)},
            "devices": self._count,
            "bytes": len(self._subject),
        }
        path = [os.path.abspath(each) for each in sys.path]
        with contextlib.suppress(BrokenPipeError):
            for part in (path, about):
                _write(self._process, json.dumps(part).encode() + b"\n")
            _write(self._process, self._subject)
        return self._process

    def _end(self) -> str:
        """End the process; return why it ended, if by itself."""
        process, self._process = self._process, None
        self._known.clear()
        if process is None:
            return ""
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        code, memory = process.close(), process.out_of_memory
        assert self._messages is not None, "opened with the process"
        with self._messages as messages:
            messages.seek(0)
            lines = messages.read().decode(errors="replace").splitlines()
        last = " | ".join([line for line in lines if line.strip()][-_LAST_LINES:])
        lack = ", for lack of this host's memory" if memory else ""
        return f"its process ended with code {code}{lack}: {last}"


def _has(name: str) -> bool:
    return hasattr(jax.config, name)


def _write(process: GuardedProcess, data: bytes) -> None:
    assert process.stdin is not None, "a pipe"
    view = memoryview(data)
    while view:
        view = view[process.stdin.write(view) :]


def _line(process: GuardedProcess, until_s: float) -> bytes:
    """Return the next line; nothing if it ends, or there is no time for it."""
    assert process.stdout is not None, "a pipe"
    poll, line = select.poll(), b""
    poll.register(process.stdout, select.POLLIN)
    while poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
        part = os.read(process.stdout.fileno(), 1 << 16)
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
    "CompiledStrategy": _compiled,
    "Checked": lambda answer: Checked(**answer),
    "Timed": lambda answer: Timed(**answer),
    "Failed": lambda answer: Failed(**answer),
}
