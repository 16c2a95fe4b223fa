"""All programs, in the order in which they are run."""

from benchmarks.truth import (
    programs_counters,
    programs_examples,
    programs_games,
    programs_half,
    programs_local,
    programs_meeting,
    programs_meshes,
    programs_modules,
    programs_refused,
    programs_solvers,
    programs_state,
    programs_sums,
)

PROGRAMS = [
    *programs_local.PROGRAMS,
    *programs_sums.PROGRAMS,
    *programs_meeting.PROGRAMS,
    *programs_games.PROGRAMS,
    *programs_modules.PROGRAMS,
    *programs_meshes.PROGRAMS,
    *programs_state.PROGRAMS,
    *programs_counters.PROGRAMS,
    *programs_half.PROGRAMS,
    *programs_solvers.PROGRAMS,
    *programs_examples.PROGRAMS,
    *programs_refused.PROGRAMS,
]

assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)
