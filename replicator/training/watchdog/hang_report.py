"""Message of a run that hangs: the process behind, and what each one waits for."""

import dataclasses
from collections.abc import Sequence

from replicator.exit_codes import HUNG
from replicator.monitoring.phases import Phase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """Statement of one process when its run hangs, published as JSON.

    Attributes:
      phase: Phase that it was in.
      step: Updates dispatched.
      seconds: Seconds in that phase.
      limit_s: Limit of the phase; None if another process exceeded its limit.
      where: The user's line that its loop was in.
      also: Lines that its other threads are in, such as a callback's.
      stacks: File with all its stacks, if one was written.
      in_callback: Whether one of its threads runs a callback that devices wait for.
    """

    phase: Phase
    step: int
    seconds: float
    limit_s: float | None
    where: str
    also: Sequence[str]
    stacks: str | None
    in_callback: bool = False


def lagging(statements: Sequence[Statement | None]) -> tuple[int, ...]:
    """Return the processes that the others wait for.

    Those without a statement, if any; else those whose devices wait for a callback,
    which may have dispatched more than the others; else those with the fewest steps;
    else those that are not in a step while others are; else none.

    >>> lagging([None, None])
    (0, 1)
    """
    silent = tuple(p for p, each in enumerate(statements) if each is None)
    if silent or len(statements) == 1:
        return silent
    known = [each for each in statements if each is not None]
    calling = tuple(p for p, each in enumerate(known) if each.in_callback)
    if 0 < len(calling) < len(known):
        return calling
    fewest = min(each.step for each in known)
    behind = tuple(p for p, each in enumerate(known) if each.step == fewest)
    if len(behind) < len(known):
        return behind
    elsewhere = tuple(p for p, each in enumerate(known) if each.phase != "step")
    return elsewhere if len(elsewhere) < len(known) else ()


def format_hang_report(
    statements: Sequence[Statement | None], *, silent_s: float, of_node: bool = False
) -> str:
    """Return the message.

    >>> print(format_hang_report([None], silent_s=10.0).splitlines()[1])
      process 0: no answer for 10 s  <- behind

    Args:
      statements: Statement of each process, in order; None for those without one.
      silent_s: Seconds that these were waited for.
      of_node: Whether a node of a program fails, instead of the process ending.
    """
    count = len(statements)
    steps = [each.step for each in statements if each is not None]
    behind = lagging(statements)
    who = "this process" if count == 1 else f"all {count} processes"
    ending = f"Ending {who} with exit code {HUNG}"
    if of_node:
        ending = "Failing the node that it runs in"
    lines = [
        f"replicator: no progress; the last step begun is {max(steps, default=0)}. "
        f"{ending}: start again, and the run goes on from its last checkpoint.",
        *(_line(p, each, p in behind, silent_s) for p, each in enumerate(statements)),
    ]
    if behind and count > 1:
        names = ", ".join(map(str, behind))
        lines.append(f"  Look first at what holds up process {names}.")
    return "\n".join(lines)


def _line(process: int, one: Statement | None, behind: bool, silent_s: float) -> str:
    mark = "  <- behind" if behind else ""
    if one is None:
        return f"  process {process}: no answer for {silent_s:.0f} s{mark}"
    limit = f" (limit {one.limit_s:g} s)" if one.limit_s is not None else ""
    more = "\n    runs a callback that devices wait for" if one.in_callback else ""
    more += "".join(f"\n    also at {line}" for line in one.also)
    more += f"\n    stacks: {one.stacks}" if one.stacks else ""
    return (
        f"  process {process}: in `{one.phase}` for {one.seconds:.1f} s{limit}, "
        f"step {one.step}, at {one.where}{mark}{more}"
    )
