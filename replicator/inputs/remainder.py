"""Join what the pipelines read into one host batch; pad and mask an uneven one.

A padded batch has the shape of a full one, so nothing recompiles. Its padding repeats
real examples, so no zero division or NaN is born there, and its leaf `mask` is 0 for
them: a mean weighted by `mask` counts every example of the dataset once.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import numpy as np

from replicator.errors import BatchError
from replicator.inputs.checks import canonical_dtype
from replicator.inputs.position import Position
from replicator.protocols import PyTree

Remainder: TypeAlias = Literal["mask", "drop", "refuse"]
"""What becomes of an uneven last batch."""

MASK = "mask"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One batch of every pipeline of this process, and what it is a part of.

    Attributes:
      parts: Arrays by pipeline; `None` where a pipeline has ended before the others.
      position: Where the input is after it.
      full: Examples that each part has in a full round.
      examples: How many there are, in the parts of all processes.
      of: How many there would be in a full round.
      sample: Rows to fill up with where this process has no part.
    """

    parts: Sequence[PyTree | None]
    position: Position
    full: int
    examples: int
    of: int
    sample: PyTree = None

    @property
    def index(self) -> int:
        """Which batch of the run this is, from 0."""
        return self.position.batches - 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostBatch:
    """A full-size batch in memory that is ours, in the dtypes that JAX will hold.

    Attributes:
      value: Leaves [host_batch, ...].
      examples: How many are real, over all processes.
      padded: Whether the others only fill up.
      position: Where the input is after it.
    """

    value: PyTree
    examples: int
    padded: bool
    position: Position


def join_round(
    found: Round, *, accumulate: int, remainder: Remainder
) -> HostBatch | None:
    """Make one host batch of a round: parts in pipeline order within each microbatch.

    So with a pipeline for each replica, every replica reads from its own pipeline under
    any accumulation.

    Args:
      found: What the pipelines read.
      accumulate: Microbatches per update.
      remainder: What becomes of a round with fewer examples than a full one.

    Returns:
      The batch, or None where an uneven one is dropped. Under "mask" every dict has a
      leaf `mask`, float32 [host_batch], or its own one multiplied by it.

    Raises:
      BatchError: The round is uneven and may not be, or cannot carry a mask.
    """
    sizes = [0 if part is None else _examples(part) for part in found.parts]
    there = [part for part in found.parts if part is not None]
    sample = there[0] if there else found.sample
    if found.examples < found.of:
        where = f"{found.examples} of {found.of} (batch {found.index})"
        _check_may_be_uneven(sample, where, remainder)
        if remainder == "drop":
            _log.warning(
                "Dropped the last examples of an epoch: %s. "
                "Pass `remainder='mask'` to count them.",
                where,
            )
            return None
    filled = [
        _fill_up(sample if part is None else part, found.full) for part in found.parts
    ]
    value = jax.tree.map(lambda *leaves: _join(leaves, accumulate), *filled)
    if remainder == "mask" and isinstance(value, dict):
        if sum(sizes) == found.full * len(sizes):
            value = _with_mask(value, full_mask(sum(sizes)))
        else:
            real = [(np.arange(found.full) < size).astype(np.float32) for size in sizes]
            value = _with_mask(value, _join(real, accumulate))
    return HostBatch(
        value=value,
        examples=found.examples,
        padded=found.examples < found.of,
        position=found.position,
    )


@functools.lru_cache
def full_mask(examples: int) -> np.ndarray:
    """Return the mask of a batch without padding: one array for all of them."""
    mask = np.ones(examples, np.float32)
    mask.flags.writeable = False
    return mask


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


def _examples(batch: PyTree) -> int:
    return len(jax.tree.leaves(batch)[0])


def _fill_up(batch: PyTree, full: int) -> PyTree:
    """Repeat the examples in turn until there are `full`."""
    examples = _examples(batch)
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
    # Always a copy: on a CPU, JAX takes over aligned NumPy memory without copying it,
    # and many producers write their next batch into the memory of their last.
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
