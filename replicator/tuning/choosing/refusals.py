"""Errors of a search: nothing works, with a change that fits; too much is asked for."""

import time
from collections.abc import Callable

from replicator.base.out_of_memory import readable
from replicator.engine.memory import larger_divisors
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
    if search.is_over and not over:
        return ArgumentError(
            "`limit_s` must be enough to compile one candidate, got too little. Pass a "
            "larger one, or fewer `candidates`."
        )
    if not over or search.memory_bytes is None:
        named = "; ".join(f"{each.name}: {each.why}" for each in search.candidates)
        return ArgumentError(
            "`strategy` must be found among candidates that work, got none: "
            f"{named[:_LONGEST]}. Mend the step, or pass other `candidates`, or a "
            "larger `limit_s`."
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


def fitting_microbatches(
    need_of: Callable[[Candidate, int], int | None], replica_batch: int, until_s: float
) -> Callable[[Candidate, float], str]:
    """Return a function that finds microbatches with which a candidate fits.

    Args:
      need_of: Compiles a candidate with so many; returns the bytes that it needs.
      replica_batch: Number of examples of a device.
      until_s: End of the time for it, by `time.monotonic`.
    """

    def found(nearest: Candidate, limit_bytes: float) -> str:
        for k in larger_divisors(max(replica_batch, 1), 1):
            if time.monotonic() > until_s:
                break
            need = need_of(nearest, k)
            if need is not None and need <= limit_bytes:
                return f"Use `accumulate={k}` under it: it needs {readable(need)}."
        return ""

    return found


def too_many(asked: int, seconds: float, limit_s: float) -> ArgumentError | None:
    """Return the error for more candidates than fit in the time; None if they do.

    Args:
      asked: Number of candidates that were asked for.
      seconds: Time that the first took to compile.
      limit_s: Time for all.
    """
    if (whole_s := seconds * asked) <= limit_s:
        return None
    fitting = max(int(limit_s / seconds), 1)
    return ArgumentError(
        f"`candidates` must fit into `limit_s`, got {asked} for {limit_s:g} s, of "
        f"which the first took {seconds:.3g} s to compile. Name {fitting}, or pass "
        f"`limit_s={2 * whole_s:.0f}`."
    )
