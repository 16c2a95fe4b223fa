"""Turn what is known of a worker's end into what the run hears: an `Exited`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicator.base.host.plain_text import plain
from replicator.distributed.processes.exits import describe_code
from replicator.errors import DecodeError, MessageTooLargeError, NodeFailedError
from replicator.launchpad_bridge.launchers.worker_reports import (
    Frame,
    Report,
    read_report,
    rebuild_error,
)
from replicator.launchpad_bridge.protocols import Exited

_INDENT = "    "
_PREEMPTED = "was preempted: it got SIGTERM, not from its launcher, and stopped"


def exited(
    name: str,
    attempt: int,
    *,
    said: Frame | None,
    heard: Mapping[str, Any],
    lines: Sequence[str],
    log: str,
) -> Exited:
    """Return how one start of a worker ended.

    Args:
      name: The worker's.
      attempt: Which start.
      said: Its own last word, if there was one.
      heard: What its fork server said: `code`, `is_killed`, `out_of_memory`, `pid`;
        or a `reason` why nobody knows.
      lines: The last that it printed, from before its traceback.
      log: Where all are.
    """
    where = f"process {heard['pid']}" if heard.get("pid") else "no process"
    if attempt:
        where += f", attempt {attempt}"
    try:
        report = None if said is None else read_report(said)
    except (DecodeError, MessageTooLargeError) as error:
        report, heard = None, {**heard, "reason": f"sent what is no report: {error}"}
    if report is not None and report.kind == "raised":
        return _raised(name, attempt, report, where, lines, log)
    is_well = heard.get("is_killed") or heard.get("code") == 0
    if report is not None and is_well:
        exited = Exited(
            name=name, attempt=attempt, outcome=report.kind, result=report.result
        )
        if report.kind != "preempted":
            return exited
        error = _failure(name, _PREEMPTED, where, lines, log)
        return dataclasses.replace(exited, error=error)
    text = _how_it_died(heard)
    if report is not None:
        text = f"returned, but then {text}"
    error = _failure(name, text, where, lines, log)
    return Exited(
        name=name,
        attempt=attempt,
        outcome="died",
        error=error,
        code=heard.get("code"),
    )


def _raised(
    name: str, attempt: int, report: Report, where: str, lines: Sequence[str], log: str
) -> Exited:
    assert report.error is not None, "of this kind"
    type_name = report.error.type_names[0].lstrip("@")
    text = f"raised {type_name}: {report.error.text}".removesuffix(": ")
    error = _failure(name, text, where, lines, log)
    error.__cause__ = rebuild_error(report.error, worker=name, where=where)
    for note in report.notes:
        error.add_note(plain(note))
    return Exited(name=name, attempt=attempt, outcome="raised", error=error)


def _how_it_died(heard: Mapping[str, Any]) -> str:
    if "reason" in heard:
        return heard["reason"]
    if heard["is_killed"]:
        return "was killed by its launcher"
    text = describe_code(heard["code"], out_of_memory=heard["out_of_memory"])
    if heard["code"] >= 0:
        return f"{text} without a word"
    # Who knows no better would suspect the run itself.
    return f"{text}, not by its launcher" if text.endswith("SIGKILL") else text


def _failure(
    name: str, text: str, where: str, lines: Sequence[str], log: str
) -> NodeFailedError:
    first, *others = text.splitlines() or [""]
    parts = [f"`{name}` {first} ({where})", *others]
    if lines:
        parts.append(f"Its last lines (all are in {log}):")
        parts.extend(_INDENT + line for line in lines)
    else:
        parts.append(f"It printed nothing (to {log}).")
    return NodeFailedError(plain("\n".join(parts)), node=name)
