"""Check that the arrays of a state may be donated: each has a buffer of its own.

A buffer that is donated twice, or donated and read, ends the process on several CPU
devices (jaxlib 0.10). Two arrays may share a buffer: `jax.device_put` copies only to
devices where the values are not yet. Results of a call share nothing with arrays from
before, so addresses are compared only if an array of the state came from elsewhere, or
if an input is like one.
"""

import contextlib
import dataclasses
import operator
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.flat_tree import FlatTree
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree
from replicator.engine.analysis.source_lines import user_stacklevel
from replicator.errors import ArgumentError


class SharedBufferWarning(UserWarning):
    """An array of the state shares memory with another one, and was copied."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Alike:
    """Arrays of a program that could share a buffer: those that are alike.

    Attributes:
      sizes: Number of bytes on each device, per leaf of the state.
      batch: Leaves of the state that are like a leaf of the batch.
      key: Leaves that are as large as the key, which may also be there as its data.
    """

    sizes: Sequence[int]
    batch: Sequence[int]
    key: Sequence[int]

    @classmethod
    def of(cls, state: PyTree, batch: PyTree, key: PyTree) -> "Alike":
        """Compare the state of a program with its other arguments."""
        leaves = jax.tree.leaves(state)
        sizes = list(map(_device_bytes, leaves))
        forms = set(map(_form, jax.tree.leaves(batch)))
        keys = set(map(_device_bytes, jax.tree.leaves(key))) - {0}
        return cls(
            sizes=sizes,
            batch=[n for n, leaf in enumerate(leaves) if _form(leaf) in forms],
            key=[n for n, size in enumerate(sizes) if size in keys],
        )

    def suspects(
        self, leaves: Sequence, foreign: Sequence[int], *, loose: bool
    ) -> Sequence[int]:
        """List the leaves that may share memory.

        Args:
          leaves: Leaves of the state.
          foreign: Positions of those that are not from the last call.
          loose: Whether the batch has arrays that could be made of the state's.
        """
        met = {*self.key, *self.batch} if loose else self.key
        if not foreign:
            return sorted(met)
        found = {_device_bytes(leaves[place]) for place in foreign} - {0}
        same = (place for place, size in enumerate(self.sizes) if size in found)
        return sorted({*met, *foreign, *same})


class Donation:
    """Checks of one compiled step on the arrays that are donated to it."""

    def __init__(self) -> None:
        # Weak: the memory of a state that its owner dropped must be free.
        self._flat: weakref.ref[FlatTree] | None = None
        self._leaves: list[weakref.ref] = []
        self._warned = False

    def returned(self, flat: FlatTree, *, as_tree: bool) -> None:
        """Remember the state that a call returned."""
        self._flat = weakref.ref(flat)
        self._leaves = list(map(weakref.ref, flat.leaves)) if as_tree else []

    def foreign(self, flat: FlatTree) -> Sequence[int]:
        """List the leaves that are not from the state that was returned last."""
        if self._flat is not None and self._flat() is flat:
            return ()
        leaves, last = flat.leaves, self._leaves
        if len(leaves) != len(last):
            return range(len(leaves))
        # A list's `==` would compare arrays. There are hundreds, at every step: the
        # loop over them is C's. A live object has one plain weak reference.
        with contextlib.suppress(TypeError):  # a Python number has none
            if all(map(operator.is_, map(weakref.ref, leaves), last)):
                return ()
        return [n for n, leaf in enumerate(leaves) if last[n]() is not leaf]

    def checked(
        self, flat: FlatTree, foreign: Sequence[int], *inputs: PyTree
    ) -> FlatTree:
        """Copy an array that is in the state twice, or is an input, too.

        Raises:
          ArgumentError: An array was donated before: to run with it crashes the process
            (jaxlib 0.10, several CPU devices).
        """
        if _any_deleted(flat.leaves):
            _refuse_donated(flat.tree)
        if not foreign:
            return flat
        seen = set(map(id, jax.tree.leaves(inputs)))
        ids = set(map(id, flat.leaves))
        if len(ids) == len(flat.leaves) and ids.isdisjoint(seen):
            return flat
        leaves = []
        for leaf in flat.leaves:
            leaves.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
            seen.add(id(leaf))
        return FlatTree(leaves, flat.structure)

    def apart(
        self,
        flat: FlatTree,
        foreign: Sequence[int],
        alike: Alike,
        *,
        loose: bool = True,
        **inputs: PyTree,
    ) -> FlatTree:
        """Copy the arrays that share memory with another array of the call.

        Args:
          flat: The state.
          foreign: Positions found by `foreign`.
          alike: Arrays of the program that could share memory.
          loose: As in `Alike.suspects`.
          **inputs: Other arguments of the program.

        Returns:
          A state whose buffers may all be donated.

        Warns:
          SharedBufferWarning: The first time that something is copied.
        """
        suspects = alike.suspects(flat.leaves, foreign, loose=loose)
        if not suspects:
            return flat
        known = set(map(id, jax.tree.leaves(inputs)))
        owners: dict[tuple, str | int] = {}
        for path, leaf in named_leaves(inputs):
            owners.update(dict.fromkeys(_buffers(leaf), path))
        leaves, shared = list(flat.leaves), {}
        for place in suspects:
            own = _buffers(leaves[place])
            if met := [owners[each] for each in own if each in owners]:
                if id(leaves[place]) not in known:  # its author knows
                    shared[place] = met[0]
                leaves[place] = copied(leaves[place])
            owners.update(dict.fromkeys(own, place))
        if shared:
            self._warn(flat, shared)
        return FlatTree(leaves, flat.structure)

    def _warn(self, flat: FlatTree, shared: dict[int, str | int]) -> None:
        if self._warned:
            return
        self._warned = True
        paths = [f"state/{path}" for path, _ in named_leaves(flat.tree)]
        place, other = next(iter(shared.items()))
        name = paths[other] if isinstance(other, int) else other
        more = f" So were {len(shared) - 1} more." if len(shared) > 1 else ""
        warnings.warn(
            f"`{paths[place]}` shares its memory with `{name}`, and the state is "
            f"donated to the step: it was copied.{more} To copy it yourself, use "
            "`jnp.copy`, or place the state with `rep.put`.",
            SharedBufferWarning,
            stacklevel=user_stacklevel(),
        )


def _any_deleted(leaves: Sequence) -> bool:
    try:
        # Nearly always all are of one type, whose own method is the fastest.
        return bool(leaves) and any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):
        return any(leaf.is_deleted() for leaf in leaves if isinstance(leaf, jax.Array))


def refuse_deleted(state: PyTree) -> None:
    """Refuse a state of which an array was donated to a step.

    Raises:
      ArgumentError: One was.
    """
    if _any_deleted(jax.tree.leaves(state)):
        _refuse_donated(state)


def _refuse_donated(state: PyTree) -> None:
    path = next(
        path
        for path, leaf in named_leaves(state)
        if isinstance(leaf, jax.Array) and leaf.is_deleted()
    )
    raise ArgumentError(
        "`state` must be the one that the last call returned, got one that was donated "
        f"(`{path}`). Write `state, metrics = step(state, batch)`."
    )


def _device_bytes(leaf: PyTree) -> int:
    """Return the bytes of an array of JAX on each of its devices, 0 for any other."""
    shards = _shards(leaf)
    return shards[0].data.nbytes if shards else 0


def _form(leaf: PyTree) -> tuple:
    """Return the properties that `jax.device_put` keeps if it copies nothing."""
    shape = np.shape(leaf)
    sharding = getattr(leaf, "sharding", None)
    return shape, sharding.shard_shape(shape) if sharding else shape, leaf.dtype


def _buffers(leaf: PyTree) -> set[tuple]:
    """Return (device, address) of each buffer of an array."""
    if not np.size(leaf):
        return set()
    return {(each.device, each.data.unsafe_buffer_pointer()) for each in _shards(leaf)}


def _shards(leaf: PyTree) -> Sequence[Any]:
    # Memory of NumPy is never donated.
    return getattr(leaf, "addressable_shards", ())


def copied(leaf: jax.Array) -> jax.Array:
    """Copy an array on its devices, without the other processes.

    >>> x = jnp.ones(3)
    >>> copied(x).unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    False
    """
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = copied(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    shards = [jnp.copy(shard.data) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
