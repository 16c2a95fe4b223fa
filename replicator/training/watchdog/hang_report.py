"""The message that a hung run leaves: who is behind, what each process waits for."""

import dataclasses
from collections.abc import Sequence

from replicator.exit_codes import HUNG
from replicator.monitoring.phases import Phase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """What one process says about itself when its run hangs; as JSON, on the board.

    Attributes:
      phase: What it was in.
      step: Updates it had dispatched.
      seconds: How long the phase had lasted.
      limit_s: How long it may; None for a process that was well, and told by another.
      where: The user's line that its loop was in.
      also: Lines that other threads of it are in, such as a callback's.
      stacks: The file with all its stacks, if one was written.
      in_callback: Whether a thread of it runs a callback, which devices wait for.
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
    """Name the processes that the others wait for.

    Those that said nothing, if any; else those whose devices wait for a callback, which
    may have dispatched more than the others; else those with the fewest steps; else
    those that are not in a step while others are; else nobody in particular.
    """
    silent = tuple(p for p, said in enumerate(statements) if said is None)
    if silent or len(statements) == 1:
        return silent
    known = [said for said in statements if said is not None]
    calling = tuple(p for p, said in enumerate(known) if said.in_callback)
    if 0 < len(calling) < len(known):
        return calling
    fewest = min(said.step for said in known)
    behind = tuple(p for p, said in enumerate(known) if said.step == fewest)
    if len(behind) < len(known):
        return behind
    elsewhere = tuple(p for p, said in enumerate(known) if said.phase != "step")
    return elsewhere if len(elsewhere) < len(known) else ()


def format_hang_report(
    statements: Sequence[Statement | None], *, silent_s: float, of_node: bool = False
) -> str:
    """Write the message.

    Args:
      statements: Of each process, in order; None for those that said nothing.
      silent_s: How long these were waited for.
      of_node: Whether it is a node of a program that ends, and not the process.
    """
    count = len(statements)
    steps = [said.step for said in statements if said is not None]
    behind = lagging(statements)
    who = "this process" if count == 1 else f"all {count} processes"
    ending = f"Ending {who} with exit code {HUNG}"
    if of_node:
        ending = "Failing the node that it runs in"
    lines = [
        f"replicator: no progress; the last step begun is {max(steps, default=0)}. "
        f"{ending}: start again, and the run goes on from its last checkpoint.",
        *(_line(p, said, p in behind, silent_s) for p, said in enumerate(statements)),
    ]
    if behind and count > 1:
        names = ", ".join(map(str, behind))
        lines.append(f"  Look first at what holds up process {names}.")
    return "\n".join(lines)


def _line(process: int, said: Statement | None, behind: bool, silent_s: float) -> str:
    mark = "  <- behind" if behind else ""
    if said is None:
        return f"  process {process}: no answer for {silent_s:.0f} s{mark}"
    limit = f" (limit {said.limit_s:g} s)" if said.limit_s is not None else ""
    more = "\n    runs a callback that devices wait for" if said.in_callback else ""
    more += "".join(f"\n    also at {line}" for line in said.also)
    more += f"\n    stacks: {said.stacks}" if said.stacks else ""
    return (
        f"  process {process}: in `{said.phase}` for {said.seconds:.1f} s{limit}, "
        f"step {said.step}, at {said.where}{mark}{more}"
    )
