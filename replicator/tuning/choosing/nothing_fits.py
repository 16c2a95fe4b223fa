"""The error where no strategy works: the nearest, what it lacks, and a change."""

from collections.abc import Callable

from replicator.base.out_of_memory import readable
from replicator.errors import ArgumentError, DeviceMemoryError
from replicator.strategies.choose import SPARE, Candidate, Search

_LONGEST = 600


def nothing_fits(
    search: Search, microbatches: Callable[[Candidate, float], str]
) -> ArgumentError | DeviceMemoryError:
    """Return the error to raise for a search that found nothing.

    Args:
      search: The search, at its end.
      microbatches: Finds microbatches with which a candidate needs no more than so many
        bytes; returns the remedy, or nothing.
    """
    over = search.all_of("does not fit")
    if not over or search.memory_bytes is None:
        named = "; ".join(f"{each.name}: {each.why}" for each in search.candidates)
        return ArgumentError(
            "`strategy` must be found among candidates that work, got none: "
            f"{named[:_LONGEST]}. Mend the step, or pass other `candidates`."
        )
    compiled = [each for each in over if each.need_bytes]  # others need more than said
    nearest = min(compiled or over, key=lambda one: one.need_bytes or one.least_bytes)
    need, limit = nearest.need_bytes or nearest.least_bytes, search.memory_bytes / SPARE
    remedy = microbatches(nearest, limit) if nearest.need_bytes else ""
    if not remedy:
        times = -(-need // int(limit))
        remedy = f"Use {times} times as many devices, or a smaller model or batch."
    return DeviceMemoryError(
        "`strategy` must make the step fit into each device's memory, got none that "
        f"does: {nearest.name} is the nearest, and needs {readable(need)}, "
        f"{readable(need - int(limit))} more than the {readable(int(limit))} that it "
        f"may have. {remedy}"
    )
