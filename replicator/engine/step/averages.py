"""Average parameters over updates: an exponential moving average."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from replicator.base.types import PyTree
from replicator.collectives.context.microbatch import is_last_microbatch
from replicator.errors import ArgumentError, check_number


class Ema(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: `init(params) -> average`; the average is a copy.
      update: `update(params, average) -> average`; call it once in each step, with the
        parameters after the optimizer's update.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree], PyTree]


def ema(decay: float) -> Ema:
    """Keep an exponential moving average of parameters (Polyak and Juditsky 1992).

    average ← decay·average + (1 - decay)·params, once per update.

    Args:
      decay: Weight of the past, in [0, 1).

    Returns:
      Functions `init` and `update`.

    Raises:
      ArgumentError: `decay` is out of range.

    >>> average = ema(0.75)
    >>> params = {"w": jnp.array(1.0)}
    >>> kept = average.init(params)
    >>> average.update({"w": jnp.array(2.0)}, kept)["w"].item()
    1.25
    """
    check_number("decay", decay)
    if not 0.0 <= decay < 1.0:
        raise ArgumentError(
            f"`decay` must be at least 0 and below 1, got {decay}. Use 0.999 to "
            "average over about a thousand updates."
        )

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)

    def update(params: PyTree, average: PyTree) -> PyTree:
        moves = is_last_microbatch()
        return jax.tree.map(
            # The difference first: in half precision decay·average would lose it.
            lambda new, old: jnp.where(moves, old + (new - old) * (1.0 - decay), old),
            params,
            average,
        )

    return Ema(init, update)
