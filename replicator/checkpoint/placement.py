"""Place saved arrays as in a state of this run, or report why they do not fit."""

import dataclasses
import fnmatch
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from replicator.base.mesh import leaf_shardings, put
from replicator.base.padded import is_padded, pad_to
from replicator.base.trees import nested
from replicator.base.types import PyTree
from replicator.checkpoint.manifest import LeafRecord, Manifest
from replicator.checkpoint.pieces.reads import (
    Read,
    read_all,
    sharded_leaf,
    whole_leaf,
)
from replicator.checkpoint.pieces.stored_state import StoredState
from replicator.checkpoint.resize import resize
from replicator.checkpoint.snapshot import count_devices, describe_leaves
from replicator.errors import CheckpointMismatchError

_NAMED = 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """A restored state.

    Attributes:
      arrays: The state, in the requested structure.
      lost: Guarantees that no longer hold, a sentence each.
    """

    arrays: PyTree
    lost: tuple[str, ...]


def read_nested(
    manifest: Manifest, state: StoredState, *, only: str | None = None
) -> PyTree:
    """Return saved arrays as nested dicts of NumPy arrays, keyed by parts of paths.

    Args:
      manifest: Manifest of the checkpoint.
      state: Its arrays.
      only: Pattern of paths to restore; all by default.

    Raises:
      CheckpointError: The arrays are damaged.
      CheckpointMismatchError: `only` matches no leaf.
    """
    wanted = [
        (number, leaf)
        for number, leaf in enumerate(manifest.leaves)
        if _matches(leaf, only)
    ]
    if not wanted:
        raise _no_match(only, "the checkpoint")
    arrays = read_all(whole_leaf(state, number) for number, _ in wanted)
    return nested(
        (leaf.parts, _with_key_type(leaf, array))
        for (_, leaf), array in zip(wanted, arrays, strict=True)
    )


def place_like(
    like: PyTree,
    manifest: Manifest,
    state: StoredState,
    *,
    only: str | None = None,
    shardings: PyTree = None,
) -> RestoredState:
    """Read saved arrays to the devices of the leaves of `like`.

    Each process reads the regions that its devices need, and each of these once.

    Args:
      like: A state of this run: arrays, or `jax.ShapeDtypeStruct`s with shardings. A
        leaf without sharding is restored as a NumPy array.
      manifest: Manifest of the checkpoint.
      state: Its arrays.
      only: Pattern of paths to restore (`*` also matches slashes); other leaves stay as
        they are in `like`.
      shardings: Shardings instead of those of `like`; a list with that of each leaf, or
        a prefix of its tree.

    Returns:
      The state, and the guarantees that no longer hold.

    Raises:
      CheckpointError: The arrays are damaged.
      CheckpointMismatchError: Another state was saved; the error names the first
        leaves that differ.
    """
    leaves, values = describe_leaves(like)
    if shardings is None:
        where = [getattr(value, "sharding", None) for value in values]
    else:
        where = list(leaf_shardings(like, shardings))
    numbers = {leaf.parts: number for number, leaf in enumerate(manifest.leaves)}
    asked = [leaf for leaf in leaves if _matches(leaf, only)]
    _require_same(asked, manifest, only)
    reads: list[Read] = []
    lost: list[str] = []
    for leaf, value, sharding in zip(leaves, values, where, strict=True):
        if not _matches(leaf, only):
            reads.append(
                _no_read(
                    _as_it_is(leaf, value), None if shardings is None else sharding
                )
            )
            continue
        number = numbers[leaf.parts]
        before = manifest.leaves[number]
        if before.shape != leaf.shape:
            lost.append(
                f"`{leaf.path}` is the {leaf.on_resize} of {before.shape[0]} replicas."
            )
        shape = value.padded.shape if is_padded(value) else leaf.shape
        if sharding is None or before.shape != leaf.shape or before.key_impl:
            place = functools.partial(_place, before, leaf, shape, sharding)
            reads.append(whole_leaf(state, number, place))
        else:
            reads.append(sharded_leaf(state, number, shape=shape, sharding=sharding))
    tree = jax.tree.unflatten(jax.tree.structure(like), read_all(reads))
    now = count_devices(jax.tree.leaves(tree))
    if now != manifest.num_devices:
        lost.insert(
            0,
            f"Step {manifest.step} was saved on {manifest.num_devices} devices, and is "
            f"restored on {now}: its values are exact, but later steps may differ in "
            "bits from those of a run on the same number.",
        )
    return RestoredState(arrays=tree, lost=tuple(lost))


def _require_same(
    asked: Sequence[LeafRecord], manifest: Manifest, only: str | None
) -> None:
    if only is not None and not asked:
        raise _no_match(only, "`like`")
    saved = {leaf.parts: leaf for leaf in manifest.leaves}
    differences = [
        text for leaf in asked if (text := _difference(leaf, saved.get(leaf.parts)))
    ]
    if only is None:
        known = {leaf.parts for leaf in asked}
        differences += [
            f"`{leaf.path}` was saved and is not in the state"
            for leaf in manifest.leaves
            if leaf.parts not in known and not _is_former(leaf)
        ]
    if differences:
        more = len(differences) - _NAMED
        listed = "; ".join(differences[:_NAMED]) + (
            f"; {more} more" if more > 0 else ""
        )
        raise CheckpointMismatchError(
            f"The state must be that of the model that was saved at step "
            f"{manifest.step}, got another: {listed}. Begin anew in another directory, "
            "or restore a part with `CheckpointStore.restore(..., only=...)`."
        )


def _matches(leaf: LeafRecord, only: str | None) -> bool:
    return only is None or fnmatch.fnmatchcase(leaf.path, only)


def _no_match(only: str | None, where: str) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"`only` must match a leaf of {where}, got {only!r}, which matches none. "
        'Write for example `only="user/params/*"`.'
    )


def _is_former(leaf: LeafRecord) -> bool:
    """Return whether a leaf is one that only former versions save.

    The state of a wrapped optimizer once held the norm of its last gradient.
    """
    return (leaf.parts[-1], leaf.dtype, leaf.shape) == ("gradient_norm", "float32", ())


def _difference(leaf: LeafRecord, saved: LeafRecord | None) -> str | None:
    if saved is None:
        return f"`{leaf.path}` was not saved"
    is_same = saved.dtype == leaf.dtype and (
        saved.shape == leaf.shape or _differ_in_replicas(saved, leaf)
    )
    return None if is_same else f"`{leaf.path}` was saved as {saved} and is {leaf}"


def _differ_in_replicas(saved: LeafRecord, leaf: LeafRecord) -> bool:
    both_declared = saved.on_resize is not None and leaf.on_resize is not None
    return (
        both_declared
        and min(len(saved.shape), len(leaf.shape)) > 0
        and saved.shape[1:] == leaf.shape[1:]
    )


def _no_read(value: Any, sharding: Sharding | None) -> Read:
    """Return a read of what is here already."""
    placed = value if sharding is None else put([value], [sharding])[0]
    return Read(nbytes=0, begin=lambda: lambda: placed)


def _place(
    before: LeafRecord,
    leaf: LeafRecord,
    shape: tuple[int, ...],
    sharding: Sharding | None,
    array: np.ndarray,
) -> Any:
    """Return a leaf that was read whole as the one of this run."""
    if before.shape != leaf.shape:
        array = _resize(before, leaf, array)
    if leaf.shape != shape:
        array = pad_to(array, shape)
    placed = _with_key_type(before, array)
    return placed if sharding is None else put([placed], [sharding])[0]


def _resize(saved: LeafRecord, leaf: LeafRecord, array: np.ndarray) -> np.ndarray:
    # This run's choice counts: declaring another is the remedy for `refuse`.
    choice = leaf.on_resize or "refuse"
    return resize(array, saved, num_replicas=leaf.shape[0], on_resize=choice)


def _as_it_is(leaf: LeafRecord, value: Any) -> Any:
    value = value.padded if is_padded(value) else value
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointMismatchError(
            f"`like` must hold arrays where `only` does not match, got none at "
            f"`{leaf.path}`. Pass an initial state."
        )
    return value


def _with_key_type(leaf: LeafRecord, array: np.ndarray) -> Any:
    if leaf.key_impl is None:
        return array
    return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.key_impl)
