"""Have a process of its own answer one order: it may run out of time, or die.

    here ── the import path, as JSON; the order, pickled ──> its standard input
    here <── the answer, bytes ───────────────────────────── its standard output

What it prints itself, and a compiler's messages, go to its standard error, whose end is
the reason if it dies. A guard ends it with this process.
"""

import contextlib
import io
import json
import os
import pickle
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

from replicator.distributed.processes.exits import describe_code
from replicator.distributed.processes.guarded import GuardedProcess
from replicator.distributed.report_progress import VARIABLE

_PROGRAM = (
    "import importlib, json, sys; "
    "sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "importlib.import_module(sys.argv[1]).main()"
)
# Of a run of several processes, or for its devices: the child is none of them.
_NOT_HANDED_ON = {
    *("REPLICATOR_COORDINATOR", "REPLICATOR_NUM_PROCESSES", "REPLICATOR_PROCESS_ID"),
    "REPLICATOR_COORDINATOR_BIND",
    *("REPLICATOR_FAKE_DEVICES", VARIABLE),
}
_LAST_LINES = 3
_FRAME = re.compile(r"\s+@ +0x|\*\*\* Check failure")  # of a compiler that aborts
_LINGER_S = 10.0
_FAKE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildEnd:
    """The end of a child that has not answered.

    Attributes:
      is_late: Whether it was ended, for its time was over.
      why: How it ended, and the last that it printed.
    """

    is_late: bool
    why: str


def ask_child(
    module: str, order: Any, *, limit_s: float, **environ: str
) -> bytes | ChildEnd:
    """Run a module's `main` in a process of its own; return what it writes.

    Args:
      module: Name of the module. Its `main` unpickles the order from standard input.
      order: Data; functions in it are sent by cloudpickle.
      limit_s: Seconds after which the process is ended.
      environ: What is added to its environment.
    """
    until_s = time.monotonic() + limit_s
    with started_child(module, environ) as (process, messages):
        written, is_late = _talk(process, pickled(order), until_s)
        if written:
            return written
        if is_late:
            return ChildEnd(is_late=True, why=f"not done within {limit_s:g} s")
        return ChildEnd(is_late=False, why=how_it_ended(process, messages))


def how_it_ended(process: GuardedProcess, messages: IO[bytes]) -> str:
    """Return how a child ended whose output is at its end, and its last lines.

    Args:
      process: The child.
      messages: What it printed.
    """
    if process.exited >= 0:  # its output ends a moment before it does
        poll = select.poll()
        poll.register(process.exited, select.POLLIN)
        poll.poll(_LINGER_S * 1e3)
    code = process.close()
    how = describe_code(code, out_of_memory=process.out_of_memory)
    return f"it {how}: {_last_lines(messages)}"


@contextlib.contextmanager
def started_child(
    module: str, added: dict[str, str], *, stderr: int | None = None
) -> Iterator[tuple[GuardedProcess, IO[bytes]]]:
    """Have a module's `main` run in a process of its own as long as a block lasts.

    Args:
      module: Name of the module.
      added: What is added to the environment.
      stderr: Descriptor to print to, in place of the file.

    Yields:
      The process, and the file of what it prints, in a private folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="replicator-child-"))
    environ = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON} | added
    environ["XLA_FLAGS"] = _FAKE_COUNT.sub("", environ.get("XLA_FLAGS", ""))
    # Beside a process that has the memory of the same GPU.
    environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        with open(folder / "messages", "w+b") as messages:
            process = GuardedProcess(
                [sys.executable, "-P", "-c", _PROGRAM, module],
                owner=folder.name,
                environ=environ,
                folder=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages if stderr is None else stderr,
            )
            try:
                yield process, messages
            finally:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
                process.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _talk(process: GuardedProcess, order: bytes, until_s: float) -> tuple[bytes, bool]:
    """Hand over the order; return what it wrote, and whether time was over."""
    assert process.stdin is not None, "a pipe"
    assert process.stdout is not None, "a pipe"
    send(process, import_path() + order, until_s)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    poll, written = select.poll(), b""
    poll.register(process.stdout, select.POLLIN)
    while poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
        if not (part := os.read(process.stdout.fileno(), 1 << 16)):
            return written, False
        written += part
    return b"", True


def pickled(
    order: Any, reduce: Callable[[Any], Any] = lambda part: NotImplemented
) -> bytes:
    """Return data as a child unpickles it; functions in it are sent by value.

    Args:
      order: The data.
      reduce: Returns what a part is made of, as `object.__reduce__` does; or
        `NotImplemented` for the usual.

    Raises:
      Exception: It cannot be pickled.

    >>> len(pickled(lambda: 1)) > 0
    True
    """

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce(obj)
            is_usual = reduced is NotImplemented
            return super().reducer_override(obj) if is_usual else reduced

    file = io.BytesIO()
    Pickler(file).dump(order)
    return file.getvalue()


def received_order() -> Any:
    """Return the next order that a child is given, over a pipe from its parent.

    Raises:
      EOFError: There is none any more.
    """
    return pickle.load(sys.stdin.buffer)


def unpickled(part: bytes) -> Any:
    """Return a part of an order that was pickled by itself.

    Raises:
      Exception: It cannot be unpickled here.
    """
    return pickle.loads(part)


def import_path() -> bytes:
    """Return the line that a child reads first."""
    path = [os.path.abspath(each) for each in sys.path]
    return json.dumps(path).encode() + b"\n"


def send(process: GuardedProcess, data: bytes, until_s: float) -> None:
    """Write to a child's input; less than all if it dies, or does not read in time.

    Args:
      process: The child.
      data: What to write.
      until_s: End of its time, by `time.monotonic`.
    """
    assert process.stdin is not None, "a pipe"
    view, poll = memoryview(data), select.poll()
    poll.register(process.stdin, select.POLLOUT)
    os.set_blocking(process.stdin.fileno(), False)
    # One that dies at once reads nothing, and its exit says so.
    with contextlib.suppress(BrokenPipeError):
        while view and poll.poll(max(until_s - time.monotonic(), 0) * 1e3):
            view = view[os.write(process.stdin.fileno(), view) :]


def _last_lines(messages: IO[bytes]) -> str:
    messages.seek(0)
    lines = messages.read().decode(errors="replace").splitlines()
    said = [line for line in lines if line.strip() and not _FRAME.match(line)]
    return " | ".join(said[-_LAST_LINES:])
