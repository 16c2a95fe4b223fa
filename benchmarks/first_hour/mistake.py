"""A mistake that newcomers make: its program, and what must be named. Data, no effects.

A program is what follows `from benchmarks.first_hour.problem import *`: its names are
in use without an import.
"""

import dataclasses
from collections.abc import Mapping

MOST_LINES = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """One program, and what its message must hold. Written before it was run.

    Attributes:
      name: The mistake in some words.
      program: Its lines.
      names: Texts that the message must hold: the argument, the leaf, or the line.
      remedy: Text of what to do instead, likewise.
      report: Public report of it: `owner/repository#number`.
      quiet: Whether plain JAX, or another framework, ends well with a wrong answer.
      right: Lines that do the same without the mistake, for one that changes nothing:
        both print the same.
      environment: Variables that it sets; it then runs in an interpreter of its own.
      bare: Whether it runs without the names of `problem`.
    """

    name: str
    program: str
    names: tuple[str, ...] = ()
    remedy: str = ""
    report: str = ""
    quiet: bool = False
    right: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bare: bool = False


def mistake(name: str, program: str, *names: str, **fields: object) -> Mistake:
    """Return a mistake, its program without the lines around it.

    >>> mistake("no steps", "rep.run(step_fn)", "`dataset`", remedy="Pass").names
    ('`dataset`',)
    """
    lines = program.strip("\n")
    return Mistake(name=name, program=lines, names=names, **fields)  # type: ignore[arg-type]
