"""Bound the number of steps in flight.

JAX dispatches without waiting. On fake CPU devices every step in flight holds a thread
per device in a collective, and a pool without free threads aborts the process: on eight
devices 17 steps are too many. Elsewhere running ahead costs memory and makes errors
late. The bound waits on arrays, it never polls.
"""

from collections import deque

import jax

from replicator.base.types import PyTree
from replicator.errors import check_count

DEFAULT_RUN_AHEAD = 4
MOST_ON_CPU = 16


class RunAhead:
    """Keep at most `limit` steps in flight; on CPU never more than 16.

    Call `admit` after each dispatch. It returns when one more step may be dispatched:
    with `limit=1` that is when the step is done.

    Args:
      limit: Number of steps in flight, at least 1.

    Raises:
      ArgumentError: `limit` is below 1.

    >>> ahead = RunAhead(limit=2)
    >>> for step in range(5):
    ...     ahead.admit(jnp.ones(()))
    >>> ahead.in_flight <= 2
    True
    """

    def __init__(self, limit: int = DEFAULT_RUN_AHEAD):
        remedy = f"Use {DEFAULT_RUN_AHEAD}, or 1 to wait for every step."
        check_count("max_in_flight", limit, remedy)
        self._limit = limit
        self._in_flight: deque[list[jax.Array]] = deque()

    @property
    def in_flight(self) -> int:
        """Number of admitted steps that were not waited for yet."""
        return len(self._in_flight)

    def admit(self, outputs: PyTree) -> None:
        """Count a dispatched step; wait until there is room for one more.

        Args:
          outputs: Arrays that the step returned and that are not donated. All are kept:
            JAX returns an output that is an unchanged input at once, before the step
            is done.
        """
        arrays = _arrays(outputs)
        if not arrays:
            return
        self._in_flight.append(arrays)
        if self._limit > MOST_ON_CPU and _on_cpu(arrays[0]):
            self._limit = MOST_ON_CPU
        self._wait_until_at_most(self._limit - 1)

    def _wait_until_at_most(self, count: int) -> None:
        while len(self._in_flight) > count:
            for array in self._in_flight.popleft():
                array.block_until_ready()


def is_under_way(outputs: PyTree) -> bool:
    """Return, without waiting, whether a step is still being computed.

    Args:
      outputs: Its results, which are not donated: one array stands for all. The answer
        is False if that is not an array of a device.

    >>> is_under_way({"loss": 1.0})
    False
    """
    leaf = outputs
    while isinstance(leaf, dict):
        leaf = next(iter(leaf.values()), None)
    is_ready = getattr(leaf, "is_ready", None)
    return is_ready is not None and not is_ready()


def _arrays(tree: PyTree) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
