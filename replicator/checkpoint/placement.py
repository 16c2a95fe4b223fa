"""Place saved arrays as in a state of this run, or report why they do not fit."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.mesh import put
from replicator.base.padded import is_padded, pad_to
from replicator.base.trees import nested
from replicator.base.types import PyTree
from replicator.checkpoint.manifest import LeafRecord, Manifest
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


def nest(leaves: Sequence[LeafRecord], arrays: Sequence[np.ndarray]) -> PyTree:
    """Return saved arrays as nested dicts, keyed by the parts of paths.

    >>> leaf = LeafRecord(parts=("params", "w"), dtype="float32", shape=(1,))
    >>> nest([leaf], [np.zeros(1, np.float32)])
    {'params': {'w': array([0.], dtype=float32)}}
    """
    return nested(
        (leaf.parts, _with_key_type(leaf, array))
        for leaf, array in zip(leaves, arrays, strict=True)
    )


def place_like(
    like: PyTree,
    manifest: Manifest,
    arrays: Sequence[np.ndarray],
    *,
    only: str | None = None,
    shardings: PyTree = None,
) -> RestoredState:
    """Put saved arrays on the devices of the leaves of `like`.

    Args:
      like: A state of this run: arrays, or `jax.ShapeDtypeStruct`s with shardings. A
        leaf without sharding is restored as a NumPy array.
      manifest: Manifest of the checkpoint.
      arrays: Its arrays, in the order of its leaves.
      only: Pattern of paths to restore (`*` also matches slashes); other leaves stay as
        they are in `like`.
      shardings: Shardings instead of those of `like`; a list with that of each leaf, or
        a prefix of its tree.

    Returns:
      The state, and the guarantees that no longer hold.

    Raises:
      CheckpointMismatchError: Another state was saved; the error names the first
        leaves that differ.
    """
    leaves, values = describe_leaves(like)
    wanted = [only is None or fnmatch.fnmatchcase(leaf.path, only) for leaf in leaves]
    saved = {
        leaf.parts: (leaf, array)
        for leaf, array in zip(manifest.leaves, arrays, strict=True)
    }
    asked = [leaf for leaf, is_wanted in zip(leaves, wanted, strict=True) if is_wanted]
    _require_same(asked, saved, manifest, only)
    placed, lost = [], []
    for leaf, value, is_wanted in zip(leaves, values, wanted, strict=True):
        if not is_wanted:
            placed.append(_as_it_is(leaf, value))
            continue
        before, array = saved[leaf.parts]
        if before.shape != leaf.shape:
            array = _resize(before, leaf, array)
            lost.append(
                f"`{leaf.path}` is the {leaf.on_resize} of {before.shape[0]} replicas."
            )
        if is_padded(value):
            array = pad_to(array, value.padded.shape)
        placed.append(_with_key_type(before, array))
    tree = jax.tree.unflatten(
        jax.tree.structure(like), _put(placed, like, values, shardings)
    )
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
    asked: Sequence[LeafRecord],
    saved: Mapping[tuple[str, ...], tuple[LeafRecord, np.ndarray]],
    manifest: Manifest,
    only: str | None,
) -> None:
    if only is not None and not asked:
        raise CheckpointMismatchError(
            f"`only` must match a leaf of `like`, got {only!r}, which matches none. "
            'Write for example `only="user/params/*"`.'
        )
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


def _is_former(leaf: LeafRecord) -> bool:
    """Return whether a leaf is one that only former versions save.

    The state of a wrapped optimizer once held the norm of its last gradient.
    """
    return (leaf.parts[-1], leaf.dtype, leaf.shape) == ("gradient_norm", "float32", ())


def _difference(
    leaf: LeafRecord, found: tuple[LeafRecord, np.ndarray] | None
) -> str | None:
    if found is None:
        return f"`{leaf.path}` was not saved"
    saved = found[0]
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


def _put(
    placed: list[Any], like: PyTree, values: Sequence[Any], shardings: PyTree
) -> list[Any]:
    if shardings is not None:
        tree = jax.tree.unflatten(jax.tree.structure(like), placed)
        return jax.tree.leaves(put(tree, shardings))
    where = [getattr(value, "sharding", None) for value in values]
    moved = [number for number, sharding in enumerate(where) if sharding is not None]
    arrays = put(
        [placed[number] for number in moved], [where[number] for number in moved]
    )
    for number, array in zip(moved, arrays, strict=True):
        placed[number] = array
    return placed
