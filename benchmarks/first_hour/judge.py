"""Judge what a program printed: is the mistake named, and are the frames the user's?"""

import dataclasses
import re

from benchmarks.first_hour.mistake import Mistake
from replicator.base.tracebacks import is_library

MOST_LINES_BESIDE = 6
_FRAME = re.compile(r'\s*File "([^"]+)", line \d+')
_MARGIN = re.compile(r"^\s*[|+][-+ ]*")  # of exception groups


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
      code: Its exit code; None if it did not end in time.
      printed: Its standard output.
      errors: Its standard error.
    """

    code: int | None
    printed: str = ""
    errors: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Faults of an answer to a mistake; all False for a good one."""

    failed: bool = False
    is_long: bool = False
    hung: bool = False
    silent: bool = False
    detail: str = ""


def judge(mistake: Mistake, found: Outcome, right: Outcome | None) -> Verdict:
    """Return the faults of what a program answered.

    Args:
      mistake: Its mistake.
      found: How it ended.
      right: How the right program ended, if the mistake has one.
    """
    if found.code is None:
        return Verdict(hung=True, failed=True, detail="did not end")
    theirs, beside = lines_of(found.errors)
    too_long = len(beside) > MOST_LINES_BESIDE
    faults = [f"frame: {path}" for path in theirs]
    faults += [f"{len(beside)} lines beside the user's frames"] if too_long else []
    if right is not None:
        same = found.code == right.code == 0 and found.printed == right.printed != ""
        if not same:
            faults.append(f"printed {found.printed!r}, not {right.printed!r}")
        failed = not same
        silent = failed and found.code == 0
    else:
        wanted = (*mistake.names, mistake.remedy)
        missing = [each for each in wanted if each not in found.errors]
        faults += [f"not named: {each}" for each in missing]
        failed = bool(missing)
        silent = failed and mistake.quiet and found.code == 0
    return Verdict(
        failed=failed,
        is_long=bool(theirs) or too_long,
        silent=silent,
        detail="; ".join(faults),
    )


def lines_of(errors: str) -> tuple[list[str], list[str]]:
    """Return the files of frames that are not the user's, and lines beside frames."""
    theirs: list[str] = []
    beside: list[str] = []
    in_frame = False
    for line in errors.splitlines():
        line = _MARGIN.sub("", line)
        if frame := _FRAME.match(line):
            in_frame = True
            theirs += [frame[1]] if is_library(frame[1]) else []
        elif in_frame and line.startswith("    "):
            continue  # its line of source, and the marks below
        elif line.strip():
            in_frame = False
            beside.append(line)
    return theirs, beside
