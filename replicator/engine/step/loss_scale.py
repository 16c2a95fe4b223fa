"""A dynamic loss scale for float16: keep small gradients, and do not overflow.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2: divide it at an
overflow (and skip that update), multiply it after so many updates without one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from replicator.errors import ArgumentError, check_number, check_whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """The scale in force (float32) and the updates since it last changed (int32)."""

    value: jax.Array
    good: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Rules by which the loss scale moves.

    Attributes:
      initial: Scale of the first step.
      factor: Number by which it is multiplied or divided.
      growth_interval: Number of updates without overflow before it grows.

    Raises:
      ArgumentError: A value is out of range.

    >>> rule = DynamicLossScale(initial=1024.0)
    >>> float(rule.update(rule.init(), finite=jnp.array(False)).value)
    512.0
    """

    initial: float = 2.0**15
    factor: float = 2.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        check_number("initial", self.initial)
        check_number("factor", self.factor)
        check_whole("growth_interval", self.growth_interval)
        if self.initial <= 0 or self.factor <= 1 or self.growth_interval < 1:
            raise ArgumentError(
                "`loss_scale` must have initial > 0, factor > 1 and growth_interval >= "
                f"1, got {self}. Leave them at their defaults."
            )

    def init(self) -> LossScaleState:
        """Return the state of the first step.

        >>> float(DynamicLossScale(initial=1024.0).init().value)
        1024.0
        """
        return LossScaleState(
            value=jnp.asarray(self.initial, jnp.float32), good=jnp.zeros((), jnp.int32)
        )

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Move the scale after an update whose gradients were `finite` or not."""
        good = jnp.where(finite, state.good + 1, 0)
        grow = good == self.growth_interval
        larger = state.value * self.factor
        # An infinite scale would stay: half of it is infinite, too.
        value = jnp.where(grow & jnp.isfinite(larger), larger, state.value)
        # At least 1: a smaller scale is of no use, and a NaN loss would drive it to 0.
        value = jnp.where(finite, value, jnp.maximum(state.value / self.factor, 1.0))
        return LossScaleState(value=value, good=jnp.where(grow, 0, good))
