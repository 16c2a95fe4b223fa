"""Build the `Exited` event of a worker from its last report and its process's exit."""

import dataclasses
from collections.abc import Sequence

from replicator.base.host.plain_text import plain
from replicator.distributed.processes.exits import describe_code
from replicator.errors import DecodeError, MessageTooLargeError, NodeFailedError
from replicator.launchpad_bridge.launchers.worker_reports import (
    ReportFrame,
    read_report,
    rebuild_error,
)
from replicator.launchpad_bridge.protocols import Exited

_INDENT = "    "
_PREEMPTED = "was preempted: it got SIGTERM, not from its launcher, and stopped"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessExit:
    """Exit of a worker's process, as far as it is known.

    Attributes:
      pid: Process id; None if no process was started.
      code: Exit code, negative for a signal; None if it is not known.
      is_killed: Whether its launcher killed it.
      out_of_memory: Whether the kernel killed a process for memory while it ran.
      reason: Why its code is not known, as the rest of a sentence; empty if it is.
      lines: Last lines that it printed, from before its traceback.
      log: Place of all that it printed; empty if that is not known.
    """

    pid: int | None = None
    code: int | None = None
    is_killed: bool = False
    out_of_memory: bool = False
    reason: str = ""
    lines: Sequence[str] = ()
    log: str = ""


def exited(
    name: str, attempt: int, *, last: ReportFrame | None, end: ProcessExit
) -> Exited:
    """Return how one start of a worker ended.

    Args:
      name: Name of the worker.
      attempt: Number of the start, from 0.
      last: Its last report; None if it sent none.
      end: Exit of its process.
    """
    where = f"process {end.pid}" if end.pid else "no process"
    if attempt:
        where += f", attempt {attempt}"
    try:
        report = None if last is None else read_report(last)
    except (DecodeError, MessageTooLargeError) as error:
        report = None
        end = dataclasses.replace(end, reason=f"sent what is no report: {error}")
    if report is not None and report.error is not None:
        type_name = report.error.type_names[0].lstrip("@")
        text = f"raised {type_name}: {report.error.text}".removesuffix(": ")
        error = _failure(name, text, where, end)
        error.__cause__ = rebuild_error(report.error, worker=name, where=where)
        for note in report.notes:
            error.add_note(plain(note))
        return Exited(name=name, attempt=attempt, outcome="raised", error=error)
    if report is not None and (end.is_killed or end.code == 0):
        is_preempted = report.kind == "preempted"
        return Exited(
            name=name,
            attempt=attempt,
            outcome=report.kind,
            result=report.result,
            error=_failure(name, _PREEMPTED, where, end) if is_preempted else None,
        )
    text = _how_it_died(end)
    if report is not None:
        text = f"returned, but then {text}"
    error = _failure(name, text, where, end)
    return Exited(
        name=name, attempt=attempt, outcome="died", error=error, code=end.code
    )


def _how_it_died(end: ProcessExit) -> str:
    if end.reason or end.code is None:
        return end.reason
    if end.is_killed:
        return "was killed by its launcher"
    text = describe_code(end.code, out_of_memory=end.out_of_memory)
    if end.code >= 0:
        return f"{text} without a report"
    # Without this a reader would suspect the run itself.
    return f"{text}, not by its launcher" if text.endswith("SIGKILL") else text


def _failure(name: str, text: str, where: str, end: ProcessExit) -> NodeFailedError:
    if not end.log:
        return NodeFailedError(plain(f"`{name}` {text}"), node=name)
    first, *others = text.splitlines() or [""]
    parts = [f"`{name}` {first} ({where})", *others]
    if end.lines:
        parts.append(f"Its last lines (all are in {end.log}):")
        parts.extend(_INDENT + line for line in end.lines)
    else:
        parts.append(f"It printed nothing (to {end.log}).")
    return NodeFailedError(plain("\n".join(parts)), node=name)
