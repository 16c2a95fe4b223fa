"""Rotary positions: queries and keys turned by angles that grow with the position.

Su et al. 2021, "RoFormer", §3.4.2. Speeds may be scaled for contexts that are longer
than those of the first training, as Llama 3.1 does it (Peng et al. 2023, "YaRN", §3.2,
"NTK-by-parts").
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from replicator.collectives.moments import wider_dtype
from replicator.errors import ArgumentError, check_number


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Speeds at which pairs of features turn.

    Attributes:
      base: The slowest pair turns about once in so many positions, times 2π.
      factor: Divides the speeds of the slow pairs; 1 leaves all as they are.
      slow: Pairs that turn less often than this in `context` are slow.
      fast: Pairs that turn more often keep their speed; between the two the divisor
        changes gradually.
      context: Tokens of a sequence before the scaling.

    Raises:
      ArgumentError: A number is not above 0, or `fast` is not above `slow`.
    """

    base: float = 10_000.0
    factor: float = 1.0
    slow: float = 1.0
    fast: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            check_number(field.name, value)
            if not (math.isfinite(value) and value > 0):
                raise ArgumentError(
                    f"`{field.name}` must be above 0 and finite, got {value}. Use "
                    f"{field.default}."
                )
        if self.fast <= self.slow:
            raise ArgumentError(
                f"`fast` must be above `slow`, got {self.fast} and {self.slow}. Use "
                f"{4 * self.slow}."
            )

    def speeds(self, pairs: int) -> np.ndarray:
        """Return the angle from one position to the next, float64 [pairs].

        >>> Rotary(base=100.0).speeds(2).tolist()
        [1.0, 0.1]
        """
        speeds = self.base ** (-np.arange(pairs) / pairs)
        turns = self.context * speeds / (2 * np.pi)
        kept = np.clip((turns - self.slow) / (self.fast - self.slow), 0, 1)
        return speeds * (kept + (1 - kept) / self.factor)


def rotate(
    x: Float[Array, "batch time heads size"], rotary: Rotary | None = None
) -> Float[Array, "batch time heads size"]:
    """Turn pairs of features by angles that grow with the position.

    Products of a query and a key then depend on the distance between them (Su et al.
    2021, eq. 34). Feature i and feature i + size / 2 are a pair.

    Args:
      x: Queries or keys.
      rotary: Speeds of the pairs; those of `Rotary()` by default.

    Returns:
      As many features of the same norm.
    """
    time, half = x.shape[1], x.shape[3] // 2
    angles = np.arange(time)[:, None] * (rotary or Rotary()).speeds(half)
    dtype = wider_dtype(x.dtype, jnp.float32)
    cos, sin = (
        jnp.asarray(part[None, :, None], dtype)
        for part in (np.cos(angles), np.sin(angles))
    )
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
