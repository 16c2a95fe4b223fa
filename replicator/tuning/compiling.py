"""Compile a step in a process of its own, which may run out of time, or die.

    here ── the import path, as JSON; the order, pickled ──> its standard input
    here <── a `CompileOutcome` as JSON ──────────────────── its standard output

What it prints itself, and a compiler's messages, go to its standard error, whose end is
the reason if it dies. A guard ends it with this process.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle

from replicator.distributed.processes.guarded import GuardedProcess
from replicator.distributed.report_progress import VARIABLE
from replicator.errors import ArgumentError
from replicator.strategies.builders import Builder
from replicator.strategies.strategy import Strategy
from replicator.tuning.outcome import CompileOutcome
from replicator.tuning.problem import ProblemFile, ProblemFn

_PROGRAM = (
    "import json, sys; "
    "sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from replicator.tuning.compiler_process import main; main()"
)
# Of a run of several processes, or for its devices: the compiler is none of them.
_NOT_HANDED_ON = {
    *("REPLICATOR_COORDINATOR", "REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"),
    *("REPLICATOR_FAKE_DEVICES", VARIABLE),
}
_DEFAULT_LIMIT_S = 1800.0
_LAST_LINES = 3
_FAKE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOrder:
    """A step to compile for one strategy and one set of devices.

    Attributes:
      problem: Place of the function that returns the problem, or the function: it is
        sent by cloudpickle.
      make_replicator: `Replicator`; it is called with `devices` and `strategy`.
      strategy: The strategy; None for a replica on each device.
      devices: `"v5e:16x16"`: a topology, by libtpu. `"cpu:8"`: so many fake devices.
        `"gpu:8"`: the first of those that JAX finds.
      accumulate: Number of microbatches of an update.
      compiles: Whether to compile, or only to trace and forecast.
      kept_in: Folder of results by program, which are looked up before compiling; None
        for none.
    """

    problem: ProblemFile | ProblemFn
    make_replicator: Callable[..., Any]
    strategy: Strategy | Builder | None
    devices: str
    accumulate: int = 1
    compiles: bool = True
    kept_in: str | None = None


def compile_step(
    order: CompileOrder, *, limit_s: float = _DEFAULT_LIMIT_S
) -> CompileOutcome:
    """Compile a step in a process of its own, and wait for it.

    Nothing that the compiler does raises here: it is in the outcome.

    Args:
      order: What to compile.
      limit_s: Seconds after which the process is ended.

    Raises:
      ArgumentError: `problem` does not return a problem.
    """
    began_s = time.monotonic()
    with _started() as (process, messages):
        written, is_over = _talk(process, cloudpickle.dumps(order), limit_s)
        # 137 where this ends it.
        code = process.close() if is_over or not written else 0
        lines = _last_lines(messages)
    seconds = round(time.monotonic() - began_s, 1)
    if written:
        outcome = CompileOutcome.from_json(written)
        if outcome.status == "problem":
            raise ArgumentError(outcome.reason)
        return outcome
    if is_over:
        reason = f"not compiled within {limit_s:g} s"
        return CompileOutcome(status="timeout", reason=reason, seconds=seconds)
    memory = ", for lack of this host's memory" if process.out_of_memory else ""
    reason = f"the compiler ended with code {code}{memory}: {lines}"
    return CompileOutcome(status="died", reason=reason, seconds=seconds)


@contextlib.contextmanager
def _started() -> Iterator[tuple[GuardedProcess, IO[bytes]]]:
    folder = Path(tempfile.mkdtemp(prefix="replicator-compiler-"))
    environ = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
    environ["XLA_FLAGS"] = _FAKE_COUNT.sub("", environ.get("XLA_FLAGS", ""))
    # Beside a process that has the memory of the same GPU.
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        with open(folder / "messages", "w+b") as messages:
            process = GuardedProcess(
                [sys.executable, "-P", "-c", _PROGRAM],
                owner=folder.name,
                environ=environ,
                folder=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
            )
            try:
                yield process, messages
            finally:
                process.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _talk(process: GuardedProcess, order: bytes, limit_s: float) -> tuple[bytes, bool]:
    """Hand over the order; return what it wrote, and whether time was over."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    path = [os.path.abspath(each) for each in sys.path]
    # One that dies at once reads nothing, and its exit says so.
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        for part in (json.dumps(path).encode() + b"\n", order):
            view = memoryview(part)
            while view:
                view = view[stdin.write(view) :]
    until_s, written = time.monotonic() + limit_s, b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
        if not (part := os.read(process.stdout.fileno(), 1 << 16)):
            return written, False
        written += part
    return b"", True


def _last_lines(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").splitlines()
    return " | ".join([line for line in lines if line.strip()][-_LAST_LINES:])
