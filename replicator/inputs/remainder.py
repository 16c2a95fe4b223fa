"""Join the parts of all pipelines into one host batch; pad and mask an uneven one.

A padded batch has the shape of a full one, so nothing recompiles. Its padding repeats
real examples, which cause no division by zero or NaN, and its leaf `mask` is 0 for
them: a mean weighted by `mask` counts every example of the dataset once.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from replicator.base.types import PyTree
from replicator.errors import BatchError
from replicator.inputs.checks import canonical_dtype
from replicator.inputs.position import Position
from replicator.inputs.synchronized_reads import SharedRead

Remainder: TypeAlias = Literal["mask", "drop", "refuse"]
"""Treatment of an uneven last batch."""

MASK = "mask"

_log = logging.getLogger(__name__)


class HostBatch(NamedTuple):
    """A full-size batch in memory of its own, in the dtypes that JAX will hold.

    Attributes:
      value: Leaves [host_batch, ...].
      examples: Number of real examples, over all processes.
      padded: Whether the others only fill up.
      position: Position of the input after it.
    """

    value: PyTree
    examples: int
    padded: bool
    position: Position


def join_read(
    shared: SharedRead, position: Position, *, accumulate: int, remainder: Remainder
) -> HostBatch | None:
    """Join a read to one host batch: parts in pipeline order within each microbatch.

    So with a pipeline for each replica, every replica reads from its own pipeline under
    any accumulation.

    Args:
      shared: Read of the pipelines of this process, as a part of a global batch.
      position: Position of the input after it.
      accumulate: Microbatches per update.
      remainder: Treatment of a read with fewer examples than a full one.

    Returns:
      The batch, or None if an uneven one is dropped. Except under "refuse", every dict
      has a leaf `mask`, float32 [host_batch], or its own one multiplied by it: a step
      that reads it works under "drop", too.

    Raises:
      BatchError: The read is uneven and may not be, or cannot carry a mask.
    """
    parts, full = shared.read.parts, shared.read.full
    sizes = [0 if part is None else examples_of(part) for part in parts]
    there = [part for part in parts if part is not None]
    sample = there[0] if there else shared.sample
    if shared.examples < shared.full:
        where = f"{shared.examples} of {shared.full} (batch {position.batches - 1})"
        _check_may_be_uneven(sample, where, remainder)
        if remainder == "drop":
            _log.warning(
                "Dropped the last examples of an epoch: %s. "
                "Pass `remainder='mask'` to count them.",
                where,
            )
            return None
    if sizes != [full] * len(sizes):
        parts = [fill_up(sample if part is None else part, full) for part in parts]
    value = jax.tree.map(lambda *leaves: _join(leaves, accumulate), *parts)
    if remainder != "refuse" and isinstance(value, dict):
        value = _with_mask(value, _mask(sizes, full, accumulate))
    return HostBatch(
        value=value,
        examples=shared.examples,
        padded=shared.examples < shared.full,
        position=position,
    )


@functools.lru_cache
def full_mask(examples: int) -> np.ndarray:
    """Return the mask of a batch without padding: one shared, read-only array.

    >>> full_mask(3)
    array([1., 1., 1.], dtype=float32)
    """
    mask = np.ones(examples, np.float32)
    mask.flags.writeable = False
    return mask


def _mask(sizes: list[int], full: int, accumulate: int) -> np.ndarray | jax.Array:
    if sizes == [full] * len(sizes):
        return full_mask(full * len(sizes))
    real = [(np.arange(full) < size).astype(np.float32) for size in sizes]
    return _join(real, accumulate)


def _check_may_be_uneven(sample: PyTree, found: str, remainder: Remainder) -> None:
    if remainder == "refuse":
        raise BatchError(
            "`dataset` must yield full batches under `remainder='refuse'`, got "
            f"{found}. Pass `remainder='mask'` or `remainder='drop'`."
        )
    if remainder == "mask" and not isinstance(sample, dict):
        raise BatchError(
            f"`dataset` must yield dicts for an uneven batch to be masked, got {found} "
            f"in a `{type(sample).__name__}`. Yield dicts, or pass `remainder='drop'`."
        )


def examples_of(batch: PyTree) -> int:
    """Return the number of rows of the leaves of a batch.

    >>> examples_of({"x": np.zeros((8, 2))})
    8
    """
    return len(jax.tree.leaves(batch)[0])


def fill_up(batch: PyTree, full: int) -> PyTree:
    """Repeat the examples in order until there are `full`.

    >>> fill_up({"x": np.arange(2)}, 3)
    {'x': array([0, 1, 0])}
    """
    examples = examples_of(batch)
    if examples == full:
        return batch
    rows = np.arange(full) % examples
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)


def _join(
    leaves: Sequence[np.ndarray | jax.Array], accumulate: int
) -> np.ndarray | jax.Array:
    """Put the parts of each microbatch side by side."""
    first = leaves[0]
    if len(leaves) == 1:
        return first if isinstance(first, jax.Array) else _own(first)
    cut = (accumulate, len(first) // accumulate, *first.shape[1:])
    joined = np.concatenate([np.asarray(leaf).reshape(cut) for leaf in leaves], axis=1)
    return joined.reshape(-1, *first.shape[1:]).astype(canonical_dtype(joined.dtype))


def _own(leaf: np.ndarray) -> np.ndarray:
    # Always a copy: on a CPU, JAX uses aligned NumPy memory without copying it, and
    # many producers write their next batch into the memory of their last.
    return np.array(leaf, dtype=canonical_dtype(leaf.dtype))


def _with_mask(batch: dict, real: np.ndarray | jax.Array) -> dict:
    if MASK not in batch:
        return {**batch, MASK: real}
    if np.all(real):
        return batch
    own = jax.tree.map(lambda leaf: _masked(np.asarray(leaf), real), batch[MASK])
    return {**batch, MASK: own}


def _masked(leaf: np.ndarray, real: np.ndarray | jax.Array) -> np.ndarray:
    per_example = np.reshape(real, (-1, *[1] * (leaf.ndim - 1)))
    return leaf * per_example.astype(leaf.dtype)
