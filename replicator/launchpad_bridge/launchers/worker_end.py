"""Turn what is known of a worker's end into what the run hears: an `Exited`."""

from pathlib import Path

from replicator.errors import NodeFailedError
from replicator.launchpad_bridge.launchers.control_frames import Message
from replicator.launchpad_bridge.launchers.exit_status import describe_status
from replicator.launchpad_bridge.launchers.worker_logs import last_lines
from replicator.launchpad_bridge.launchers.worker_reports import Report, rebuild_error
from replicator.launchpad_bridge.protocols import Exited

_INDENT = "    "


def exited(
    name: str,
    attempt: int,
    *,
    said: Report | None,
    heard: Message,
    log: Path,
    log_start: int,
) -> Exited:
    """Return how one start of a worker ended.

    Args:
      name: The worker's.
      attempt: Which start.
      said: Its own last word, if there was one.
      heard: What its fork server said: `status`, `is_killed`, `out_of_memory`, `pid`;
        or a `reason` why nobody knows.
      log: Its output.
      log_start: Where that of this attempt begins.
    """
    where = f"process {heard['pid']}" if heard.get("pid") else "no process"
    if attempt:
        where += f", attempt {attempt}"
    if said is not None and said.kind == "raised":
        assert said.error is not None  # of this kind
        type_name = said.error.type_names[0].lstrip("@")
        text = f"raised {type_name}: {said.error.text}".removesuffix(": ")
        lines = last_lines(log, log_start, said.log_bytes)
        error = _failure(name, text, where, lines, log)
        error.__cause__ = rebuild_error(said.error, worker=name, where=where)
        for note in said.notes:
            error.add_note(note)
        return Exited(name=name, attempt=attempt, outcome="raised", error=error)
    if said is not None and (heard.get("is_killed") or heard.get("status") == 0):
        outcome = "stopped" if said.kind == "stopped" else "returned"
        return Exited(name=name, attempt=attempt, outcome=outcome, result=said.result)
    text = _how_it_died(heard)
    if said is not None:
        text = f"returned, but then {text}"
    error = _failure(name, text, where, last_lines(log, log_start), log)
    return Exited(name=name, attempt=attempt, outcome="died", error=error)


def _how_it_died(heard: Message) -> str:
    if "reason" in heard:
        return heard["reason"]
    if heard["is_killed"]:
        return "was killed by its launcher"
    text = describe_status(heard["status"], out_of_memory=heard["out_of_memory"])
    return f"{text} without a word" if text.startswith("exited") else text


def _failure(
    name: str, text: str, where: str, lines: list[str], log: Path
) -> NodeFailedError:
    first, *others = text.splitlines() or [""]
    parts = [f"`{name}` {first} ({where})", *others]
    if lines:
        parts.append(f"Its last lines (all are in {log}):")
        parts.extend(_INDENT + line for line in lines)
    else:
        parts.append(f"It printed nothing (to {log}).")
    return NodeFailedError("\n".join(parts), node=name)
