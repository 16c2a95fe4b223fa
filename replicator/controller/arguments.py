"""Leaves of the arguments of dataflows."""

import reprlib
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.controller.future import Future
from replicator.errors import ArgumentError

WEAK = (int, float, complex)
"""Numbers of Python, which take the dtype of what they are combined with."""


def is_placed(leaf: Any) -> bool:
    """Return whether a leaf is taken as it is: JAX or an island holds it."""
    return isinstance(leaf, (Future, jax.Array, jax.ShapeDtypeStruct))


def copied(leaf: Any) -> Any:
    """Return a value of the host as an array that the caller cannot change."""
    given = np.asarray(leaf).dtype
    if given != np.dtype(bool) and not jnp.issubdtype(given, np.number):
        raise ArgumentError(
            f"arguments of ops must be arrays, numbers or futures, got "
            f"{reprlib.repr(leaf)}. Bind others by `functools.partial` before `pw.fn`."
        )
    dtype = jax.dtypes.canonicalize_dtype(given)
    try:
        return np.array(leaf, dtype)
    except OverflowError:
        raise ArgumentError(
            f"a number must fit {dtype}, got {leaf}. Pass an array of another dtype, "
            "or set `jax_enable_x64`."
        ) from None


def check_leaves(leaves: Sequence[Any], donated: Collection[int]) -> None:
    """Refuse shapes, and futures that are donated and used again in the same call.

    Args:
      leaves: Arguments of a run.
      donated: Positions of those whose memory an op takes.
    """
    shape = next((x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)), None)
    if shape is not None:
        raise ArgumentError(
            f"a dataflow must be called with arrays, numbers or futures, got {shape}. "
            "Pass shapes to `dataflow`, which runs nothing."
        )
    for at in donated:
        if sum(leaf is leaves[at] for leaf in leaves) > 1:
            raise ArgumentError(
                "a future that an op takes the memory of must be one argument of its "
                "dataflow, got it twice. Leave it out of `donate`."
            )
