"""Copy the state before it is donated to the next step.

The copy is dispatched on the device behind the step that makes the state: the loop
waits for neither. Each process copies what the plan has it write: one copy of each
piece, on one device. The thread that writes then fetches the copies to the host.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.padded import is_padded
from replicator.base.per_replica import is_per_replica
from replicator.base.trees import leaf_path
from replicator.base.types import PyTree
from replicator.checkpoint.manifest import LeafRecord
from replicator.checkpoint.pieces.copy_place import CopyPlace
from replicator.checkpoint.pieces.grid import Box
from replicator.checkpoint.pieces.held import Held, copy_regions, plan_copies
from replicator.checkpoint.pieces.plan import Plan
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
class Block:
    """The copy of a region that this process writes.

    Attributes:
      leaf: Number of the leaf.
      box: The region.
      array: The copy, on a device or on the host.
    """

    leaf: int
    box: Box
    array: jax.Array | np.ndarray


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
      plan: Division of the leaves among processes.
      blocks: What this process writes of large leaves. Whoever writes a block takes it
        out, so that its memory is free.
      small: What this process writes of small leaves.
      process: Number of this process.
    """

    step: int
    meta: dict[str, Any]
    late: Callable[[], dict[str, Any]] | None
    metrics: dict[str, float]
    num_devices: int
    leaves: tuple[LeafRecord, ...]
    plan: Plan
    blocks: collections.deque[Block]
    small: list[Block]
    process: int


def start_copy(
    snapshot: Snapshot,
    *,
    processes: Sequence[int] = (0,),
    process: int = 0,
    place: CopyPlace = "device",
) -> Draft:
    """Copy what this process writes of a snapshot, on devices by a mere dispatch.

    Args:
      snapshot: Snapshot to copy.
      processes: Processes that save together; the first one leads.
      process: This process.
      place: Place of the copy.

    Raises:
      ArgumentError: It cannot be saved.
      DeviceMemoryError: The devices have no room for a copy.

    >>> draft = start_copy(Snapshot(step=7, arrays={"w": jnp.ones(2)}))
    >>> draft.small[0].array
    Array([1., 1.], dtype=float32)
    """
    check_whole("step", snapshot.step)
    if not 0 <= snapshot.step < 10**12:
        raise ArgumentError(
            f"`step` must be between 0 and 10^12, got {snapshot.step}. "
            "Count updates from 0."
        )
    leaves, values = describe_leaves(snapshot.arrays)
    data = [_data(leaf, value) for leaf, value in zip(leaves, values, strict=True)]
    held = tuple(
        Held(
            path=leaf.path,
            shape=array.shape if leaf.key_impl else leaf.shape,
            padded=array.shape,
            dtype=np.dtype(array.dtype),
            sharding=array.sharding if isinstance(array, jax.Array) else None,
        )
        for leaf, array in zip(leaves, data, strict=True)
    )
    plan, sources = plan_copies(held, tuple(processes), process)
    blocks = [
        Block(leaf=source.region.leaf, box=source.region.box, array=copy)
        for source, copy in zip(
            sources, copy_regions(data, sources, place), strict=True
        )
    ]
    large = len(plan.regions[process])
    late = snapshot.late
    return Draft(
        step=int(snapshot.step),
        meta=plain_json(snapshot.meta, "meta"),
        late=None if late is None else lambda: plain_json(late(), "meta"),
        metrics={name: float(value) for name, value in snapshot.metrics.items()},
        num_devices=count_devices(values),
        leaves=leaves,
        plan=plan,
        blocks=collections.deque(blocks[:large]),
        small=blocks[large:],
        process=process,
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
    paths: set[tuple[str, ...]] = set()
    for leaf in leaves:
        if leaf.parts in paths:
            raise ArgumentError(
                f"`arrays` must have one leaf at each path, got two at `{leaf.path}`. "
                "Give one of them another name."
            )
        paths.add(leaf.parts)


def _data(leaf: LeafRecord, value: Any) -> jax.Array | np.ndarray:
    """Return the array of a leaf, with its padding; of random keys their data."""
    array = value.padded if is_padded(value) else value
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    return jax.random.key_data(array) if leaf.key_impl else array


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
