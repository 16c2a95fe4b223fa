"""Argument rules of the methods of a replay table."""

from collections.abc import Sequence

import numpy as np

from replicator.base import accepts as rules
from replicator.errors import ArgumentError, check_count, check_word
from replicator.launchpad_bridge.replay.rate_limiter import RateLimiter
from replicator.launchpad_bridge.replay.removers import REMOVERS
from replicator.launchpad_bridge.replay.samplers import ReplaySampler
from replicator.launchpad_bridge.trajectories.arguments import (
    INSERT_RULES,
    MOST_EPISODES,
)
from replicator.launchpad_bridge.trajectories.table import TrajectoryError

MOST_PRIORITIES = 1 << 20
"""Most priorities in one call."""
_NUMBERS = rules.items("numbers", rules.is_number, MOST_EPISODES)
_ARRAYS = [rules.array(kind, MOST_PRIORITIES) for kind in "fiu"]
_PRIORITIES = rules.ArgumentRule(
    f"an array of one axis, of at most {MOST_PRIORITIES} numbers, or a short list",
    lambda value: any(rule.is_right(value) for rule in (*_ARRAYS, _NUMBERS)),
)
INSERT = rules.accepts(
    TrajectoryError,
    "actor",
    **INSERT_RULES,
    priorities=_PRIORITIES._replace(remedy="Pass None for the largest so far."),
)
UPDATE_PRIORITIES = rules.accepts(
    keys=rules.array("i", MOST_PRIORITIES)._replace(remedy="Pass `Taken.keys`."),
    values=_PRIORITIES,
)


def checked_priorities(
    priorities: Sequence[float] | np.ndarray | None, actor: str
) -> list[np.ndarray]:
    """Return the priorities of an insert as float64, in a list; an empty one for None.

    Raises:
      TrajectoryError: One is negative, NaN or infinite.
    """
    if priorities is None:
        return []
    values = np.array(priorities, np.float64)  # a copy: its sender may change it
    if (bad := _first_bad(values)) is not None:
        raise TrajectoryError(
            f"`priorities` of {actor} must be finite and at least 0, got {bad}. Pass "
            "None for the largest so far."
        )
    return [values]


def check_count_of(priorities: Sequence[np.ndarray], count: int, actor: str) -> None:
    """Raise a `TrajectoryError` unless each array has one for each of `count` rows."""
    for each in priorities:
        if len(each) != count:
            raise TrajectoryError(
                f"`priorities` of {actor} must have one for each row, got {len(each)} "
                f"for {count}. Pass None for the largest so far."
            )


def checked_updates(
    keys: np.ndarray, values: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys as int64 and as many priorities as float64, copies of them.

    Raises:
      ArgumentError: There is not one for each; or one is negative, NaN or infinite.
    """
    keys, values = paired_updates(keys, values)
    if (bad := _first_bad(values)) is not None:
        raise ArgumentError(
            f"`values` must be finite and at least 0, got {bad}. Use the absolute "
            "value of the error, and skip updates with NaN."
        )
    return keys, values


def paired_updates(
    keys: np.ndarray, values: Sequence[float] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys as int64 and as many priorities as float64, copies of them.

    Raises:
      ArgumentError: There is not one for each.
    """
    keys, values = np.array(keys, np.int64), np.array(values, np.float64)
    if len(keys) != len(values):
        raise ArgumentError(
            f"`values` must have one for each key, got {len(values)} for {len(keys)}. "
            "Pass the priorities of that batch."
        )
    return keys, values


def check_options(
    capacity: int,
    sampler: object,
    remover: object,
    limiter: object,
    max_times_sampled: int | None,
) -> None:
    """Raise an `ArgumentError` for options of which a table cannot be made."""
    check_count("capacity", capacity)
    if not isinstance(sampler, ReplaySampler):
        raise ArgumentError(
            "`sampler` must be one that `lp.uniform`, `lp.prioritised`, `lp.fifo` or "
            f"`lp.lifo` returns, got {sampler!r}. Pass `lp.uniform()`."
        )
    check_word("remover", remover, tuple(REMOVERS))
    if not isinstance(limiter, RateLimiter):
        raise ArgumentError(
            f"`limiter` must be a `RateLimiter`, got {limiter!r}. Pass "
            "`lp.RateLimiter(min_size=1)`."
        )
    if max_times_sampled is not None:
        check_count("max_times_sampled", max_times_sampled)
    if capacity < limiter.min_size:
        raise ArgumentError(
            f"`capacity` must be at least `min_size`, {limiter.min_size}, got "
            f"{capacity}: no batch could ever be drawn. Use {4 * limiter.min_size}."
        )


def _first_bad(values: np.ndarray) -> float | None:
    is_bad = ~((values >= 0) & (values < np.inf))
    return float(values[is_bad][0]) if is_bad.any() else None
