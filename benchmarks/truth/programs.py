"""All programs, in the order in which they are run."""

from benchmarks.truth import programs_local

PROGRAMS = [*programs_local.PROGRAMS]

assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)
