"""Run programs, each in a process of its own, some at a time.

The process is forked from one that has imported all and started nothing: it begins in
milliseconds. A program that sets variables gets an interpreter of its own.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.first_hour.judge import Outcome

_FORK = multiprocessing.get_context("fork")


class Program(NamedTuple):
    """A program to run: its file, and the variables that it sets."""

    path: Path
    environment: Mapping[str, str]


class _Running(NamedTuple):
    program: Program
    process: Any
    late_s: float


def outcomes(
    programs: Sequence[Program], *, jobs: int, timeout_s: float
) -> Iterator[tuple[Program, Outcome]]:
    """Yield how each program ended, in the order in which they do.

    Args:
      programs: All programs.
      jobs: Number of processes at a time.
      timeout_s: Seconds after which one is ended, and counts as one that hangs.
    """
    waiting, running = list(programs), []
    while waiting or running:
        while waiting and len(running) < jobs:
            program = waiting.pop(0)
            process = _FORK.Process(target=_run, args=(program,))
            process.start()
            running.append(_Running(program, process, time.monotonic() + timeout_s))
        first_s = min(each.late_s for each in running) - time.monotonic()
        ends = [each.process.sentinel for each in running]
        multiprocessing.connection.wait(ends, max(first_s, 0))
        for each in list(running):
            is_late = time.monotonic() >= each.late_s
            if each.process.is_alive() and not is_late:
                continue
            if each.process.is_alive():
                each.process.kill()
            each.process.join()
            running.remove(each)
            yield each.program, _outcome(each.program, each.process.exitcode, is_late)


def _outcome(program: Program, code: int | None, is_late: bool) -> Outcome:
    printed, errors = (
        program.path.with_suffix(suffix).read_text() for suffix in (".out", ".err")
    )
    killed = is_late and (code is None or code < 0)
    return Outcome(code=None if killed else code, printed=printed, errors=errors)


def _run(program: Program) -> None:
    """Be the program: take its streams, run its lines, and end as it does."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        path = program.path.with_suffix(suffix)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    # In place of the streams of the process that was forked.
    sys.stdout = open(1, "w", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    if program.environment:
        done = subprocess.run(
            [sys.executable, str(program.path)],
            env={**os.environ, **program.environment},
            check=False,
        )
        sys.exit(done.returncode)
    code = compile(program.path.read_text(), program.path, "exec")
    try:
        exec(code, {"__name__": "__main__", "__file__": str(program.path)})
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        # Without this function's own frame, as if the file had been started.
        sys.excepthook(type(error), error, trace.tb_next if trace else None)
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()
        sys.exit(1)
