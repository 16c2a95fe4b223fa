"""Copy the state before it is donated to the next step.

The copy is dispatched on the device behind the step that makes the state: the loop
waits for neither. A replicated value is copied once, on one device. The thread that
writes then fetches the copies to the host.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.padded import is_padded
from replicator.base.per_replica import is_per_replica
from replicator.base.trees import leaf_path
from replicator.base.types import PyTree
from replicator.checkpoint.manifest import LeafRecord
from replicator.checkpoint.pieces.state_copy import CopyPlace, copy_state
from replicator.errors import ArgumentError, check_whole

OWN = "own_by_process"
"""Key in a manifest's `meta` of the values that each process adds for itself."""

_NO_NUMBERS = "OSUMm"  # kinds of NumPy dtypes: objects, strings, times


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a whole run after one step.

    Attributes:
      step: Updates made.
      arrays: Any pytree of JAX or NumPy arrays, random keys and declared `PerReplica`
        values.
      meta: Other values to restore; plain JSON, names are strings. Of several processes
        the first one's is saved.
      own: Values of this process alone; plain JSON, small.
      late: Returns more `meta`; called by the thread that writes, in the first process.
      metrics: Metrics by name; retention ranks by one of them.
    """

    step: int
    arrays: PyTree
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    late: Callable[[], Mapping[str, Any]] | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A snapshot that no later step can change.

    Attributes:
      step: Updates made.
      meta: Plain JSON.
      late: Waits for more `meta` and returns it.
      metrics: Metrics by name.
      num_devices: Number of devices that hold the state.
      leaves: Record of each leaf.
      fetches: For each leaf, waits for its copy and returns it on the host: whole, or
        without the pieces that other processes hold. In other processes than the first
        there may be nothing to fetch.
      spread: By index, each leaf of which other processes hold pieces: the pieces
        here, as (start on each axis, copy).
    """

    step: int
    meta: dict[str, Any]
    late: Callable[[], dict[str, Any]] | None
    metrics: dict[str, float]
    num_devices: int
    leaves: tuple[LeafRecord, ...]
    fetches: tuple[Callable[[], np.ndarray], ...]
    spread: dict[int, list[tuple[tuple[int, ...], jax.Array]]]


def start_copy(
    snapshot: Snapshot, *, whole: bool = True, place: CopyPlace = "device"
) -> Draft:
    """Copy a snapshot, on its devices by a dispatch that returns at once.

    Args:
      snapshot: Snapshot to copy.
      whole: Whether to copy all values, or only pieces that no other process has.
      place: Place of the copy.

    Raises:
      ArgumentError: It cannot be saved.
      DeviceMemoryError: The devices have no room for a copy.

    >>> draft = start_copy(Snapshot(step=7, arrays={"w": jnp.ones(2)}))
    >>> draft.fetches[0]()
    array([1., 1.], dtype=float32)
    """
    check_whole("step", snapshot.step)
    if not 0 <= snapshot.step < 10**12:
        raise ArgumentError(
            f"`step` must be between 0 and 10^12, got {snapshot.step}. "
            "Count updates from 0."
        )
    leaves, values = describe_leaves(snapshot.arrays)
    spread = [number for number, value in enumerate(values) if _is_spread(value)]
    pieces = [
        _pieces(leaf, value) if whole or number in spread else []
        for number, (leaf, value) in enumerate(zip(leaves, values, strict=True))
    ]
    arrays = [[array for _, array in own] for own in pieces]
    copies = copy_state(arrays, place=place)
    late = snapshot.late
    return Draft(
        step=int(snapshot.step),
        meta=plain_json(snapshot.meta, "meta"),
        late=None if late is None else lambda: plain_json(late(), "meta"),
        metrics={name: float(value) for name, value in snapshot.metrics.items()},
        num_devices=count_devices(values),
        leaves=leaves,
        fetches=tuple(
            _fetch(leaf, value, [index for index, _ in own], copied)
            for leaf, value, own, copied in zip(
                leaves, values, pieces, copies, strict=True
            )
        ),
        spread={
            number: [
                (tuple(part.start or 0 for part in index), copy)
                for (index, _), copy in zip(pieces[number], copies[number], strict=True)
            ]
            for number in spread
        },
    )


def describe_leaves(tree: PyTree) -> tuple[tuple[LeafRecord, ...], list[Any]]:
    """Return the record of each leaf of a tree, and the leaves; `Padded` is a leaf.

    >>> str(describe_leaves({"w": np.ones(2, np.float32)})[0][0])
    'float32[2]'

    Raises:
      ArgumentError: There is no leaf, one is not an array, or two have one path.
    """
    leaves: list[LeafRecord] = []
    values: list[Any] = []
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_per_replica(node) or is_padded(node)
    )
    for above, node in nodes:
        on_resize = node.on_resize if is_per_replica(node) else None
        below_it = jax.tree_util.tree_flatten_with_path(node, is_leaf=is_padded)[0]
        for below, value in below_it:
            leaves.append(_record((*above, *below), value, on_resize))
            values.append(value)
    _require_own_paths(leaves)
    return tuple(leaves), values


def count_devices(leaves: list[Any]) -> int:
    """Return the number of devices that hold a state; 1 for one on the host.

    >>> count_devices([np.ones(2)])
    1
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    return max((sharding.num_devices for sharding in shardings if sharding), default=1)


def _record(path: tuple, value: Any, on_resize: str | None) -> LeafRecord:
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_there = isinstance(value, jax.Array)
    if not is_key and dtype.kind in _NO_NUMBERS:
        raise ArgumentError(
            f"`arrays` must hold arrays only, got {type(value).__name__} "
            f"(`{leaf_path(path)}`). Put other values into `meta`."
        )
    return LeafRecord(
        parts=tuple(leaf_path((entry,)) for entry in path) or ("state",),
        dtype=str(dtype),
        shape=np.shape(value),
        key_impl=str(jax.random.key_impl(value)) if is_key and is_there else None,
        on_resize=on_resize,
    )


def _require_own_paths(leaves: list[LeafRecord]) -> None:
    if not leaves:
        raise ArgumentError(
            "`arrays` must have a leaf, got none. Save the state that the step returns."
        )
    paths: dict[str, LeafRecord] = {}
    for leaf in leaves:
        # Orbax joins names by a dot, `path` by a slash: both must be unique.
        name = leaf.path.replace(".", "/")
        if name in paths:
            raise ArgumentError(
                f"`arrays` must have one leaf at each path, got two at `{leaf.path}` "
                f"(and `{paths[name].path}`). Give one of them another name."
            )
        paths[name] = leaf


def _pieces(leaf: LeafRecord, value: Any) -> list[tuple[Any, jax.Array]]:
    """List the pieces of a leaf, as (index in the leaf, array on a device)."""
    if is_padded(value):
        pieces = _pieces(leaf, value.padded)
        return list(filter(None, (_cut(*piece, value.shape) for piece in pieces)))
    if not isinstance(value, jax.Array):
        return []
    data = jax.random.key_data(value) if leaf.key_impl else value
    if data.is_fully_replicated:
        return [(..., data.addressable_data(0))]
    shards = [shard for shard in data.addressable_shards if shard.replica_id == 0]
    return [(shard.index, shard.data) for shard in shards]


def _cut(
    index: Any, piece: jax.Array, shape: tuple[int, ...]
) -> tuple[Any, jax.Array] | None:
    """Return a piece without padding; None if it is padding only."""
    starts = [0 if index is ... else index[d].start or 0 for d in range(len(shape))]
    own = tuple(
        slice(0, min(size, n - start))
        for size, n, start in zip(piece.shape, shape, starts, strict=True)
    )
    if any(part.stop <= 0 for part in own):
        return None
    places = zip(starts, own, strict=True)
    where = tuple(slice(start, start + part.stop) for start, part in places)
    return where, piece[own]


def _is_spread(value: Any) -> bool:
    """Return whether other processes hold pieces of a leaf that are not here."""
    value = value.padded if is_padded(value) else value
    if not isinstance(value, jax.Array):
        return False
    return not (value.is_fully_addressable or value.is_fully_replicated)


def _fetch(
    leaf: LeafRecord, value: Any, indices: list[Any], copies: list[jax.Array]
) -> Callable[[], np.ndarray]:
    if not isinstance(value.padded if is_padded(value) else value, jax.Array):
        return np.array(value).copy
    if indices == [...]:
        return functools.partial(np.asarray, copies[0])
    data = jax.eval_shape(jax.random.key_data, value) if leaf.key_impl else value
    return functools.partial(_put_together, data.shape, data.dtype, indices, copies)


def _put_together(
    shape: tuple[int, ...], dtype: Any, indices: list[Any], copies: list[jax.Array]
) -> np.ndarray:
    whole = np.empty(shape, dtype)
    for index, copy in zip(indices, copies, strict=True):
        whole[index] = np.asarray(copy)
    return whole


def plain_json(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of `meta` as plain JSON values.

    >>> plain_json({"place": (1, 2)}, "meta")
    {'place': [1, 2]}

    Raises:
      ArgumentError: JSON cannot hold it; the error contains `name`.
    """
    try:
        plain = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise ArgumentError(
            f"`{name}` must be plain JSON, got {failure}. Put arrays into `arrays`."
        ) from failure
    return plain
