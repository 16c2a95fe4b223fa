"""Place a batch on devices by a layout.

Under `accumulate=k`, microbatch j is examples [jB/k, (j+1)B/k), and replica r takes the
r-th contiguous block of it. The order of examples is therefore the same for any number
of replicas. A leaf [B, ...] lies as [B, ...] for k = 1 and as [k, B/k, ...] for k > 1;
`steps_per_call` puts the axis of its steps in front.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from replicator.base.mesh import put, spans_processes
from replicator.base.number_lists import lists_as_arrays
from replicator.base.trees import describe, named_leaves
from replicator.base.types import PyTree
from replicator.errors import BatchError
from replicator.inputs import checks
from replicator.inputs.context import BatchLayout, name_of_parts, parts_to_read
from replicator.inputs.position import Position


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """Batches on their devices, for one call of a compiled step.

    Attributes:
      value: Global arrays in the placed layout.
      examples: Number of real examples, over all steps and processes.
      padded: Whether some examples only fill up; `mask` is 0 for them.
      is_stated: Whether its form is one of `InputOptions.shapes`.
      index: Index in the run of its first batch.
      steps: Number of steps that it feeds: the leading axis, if there is one.
      accumulate: Microbatches that the layout is for.
      steps_per_call: Steps per call that the layout is for.
      position: Position of the input after it, to start another run at.
    """

    value: PyTree
    examples: int
    padded: bool
    index: int
    steps: int
    is_stated: bool = False
    accumulate: int = 1
    steps_per_call: int = 1
    position: Position = dataclasses.field(default_factory=Position)


def batch_axis(accumulate: int = 1, steps_per_call: int = 1) -> int:
    """Return the batch axis of placed leaves.

    >>> batch_axis(accumulate=4)
    1
    """
    return int(accumulate > 1) + int(steps_per_call > 1)


def place(
    batch: PyTree, layout: BatchLayout, *, accumulate: int = 1, steps_per_call: int = 1
) -> PyTree:
    """Put a batch on the devices of a layout, as a compiled step takes it.

    JAX arrays are copied from device to device. On a CPU the result may share memory
    with NumPy leaves: do not write to them afterwards.

    >>> place({"x": np.zeros((8, 2))}, rep.layout)["x"].sharding.spec
    P('replica',)

    Args:
      batch: Leaves [B, ...]; [steps, B, ...] if `steps_per_call` is more than one. B is
        the global batch, in every process.
      layout: Layout of batches on devices.
      accumulate: Microbatches per update.
      steps_per_call: Steps that one call makes.

    Returns:
      Global arrays [B, ...] or [k, B/k, ...], with the axis of steps in front; on a
      single CPU device the NumPy arrays themselves.

    Raises:
      BatchError: A leaf holds no numbers, or leading sizes differ, or do not divide
        over replicas and microbatches.
    """
    batch = lists_as_arrays(batch, name="batch")
    _checked_rows(batch, layout, accumulate, depth=int(steps_per_call > 1))
    return BatchPlacer(layout, accumulate, steps_per_call, whole=True).put(batch)


def placed_shapes(
    batch: PyTree, layout: BatchLayout, *, accumulate: int = 1, steps_per_call: int = 1
) -> PyTree:
    """Return the shapes and shardings of the result of `place`, without arrays.

    >>> placed_shapes({"x": np.zeros((8, 2))}, rep.layout, accumulate=1)["x"].shape
    (8, 2)

    Args:
      batch: As `place` takes it, or `jax.ShapeDtypeStruct`s.
      layout: Layout of batches on devices.
      accumulate: Microbatches per update.
      steps_per_call: Steps that one call makes.

    Raises:
      BatchError: As `place`.
    """
    batch, depth = lists_as_arrays(batch, name="batch"), int(steps_per_call > 1)
    rows = _checked_rows(batch, layout, accumulate, depth=depth)
    cut = (accumulate, rows // accumulate) if accumulate > 1 else (rows,)
    axis = batch_axis(accumulate, steps_per_call)
    shardings = layout.batch_shardings(batch, axis=axis)

    def shape(sharding: Sharding, leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = (
            leaf.dtype if _is_key(leaf.dtype) else checks.canonical_dtype(leaf.dtype)
        )
        sizes = (*leaf.shape[:depth], *cut, *leaf.shape[depth + 1 :])
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    return jax.tree.map(shape, jax.tree.broadcast(shardings, batch), batch)


def placed(
    batch: PyTree,
    layout: BatchLayout,
    *,
    accumulate: int,
    steps_per_call: int,
    index: int,
    position: Position,
) -> Placed:
    """Place a batch that does not come from an input, for one call of a step.

    Args:
      batch: As `place` takes it.
      layout: Layout of batches on devices.
      accumulate: Microbatches per update.
      steps_per_call: Steps that one call makes.
      index: Index in the run of its first batch.
      position: Position of the input, if there is one.

    Raises:
      BatchError: As `place`.
    """
    batch = lists_as_arrays(batch, name="batch")
    value = place(batch, layout, accumulate=accumulate, steps_per_call=steps_per_call)
    sizes = np.shape(jax.tree.leaves(batch)[0])
    return Placed(
        value=value,
        examples=int(np.prod(sizes[: 1 + int(steps_per_call > 1)])),
        padded=False,
        index=index,
        steps=steps_per_call,
        accumulate=accumulate,
        steps_per_call=steps_per_call,
        position=position,
    )


class BatchPlacer:
    """Places batches that are known to fit on devices, one after the other.

    Args:
      layout: Layout of batches on devices.
      accumulate: Microbatches per update.
      steps_per_call: Steps that one call makes.
      whole: Whether each process has the global batch, or only its own parts.
    """

    def __init__(
        self, layout: BatchLayout, accumulate: int, steps_per_call: int, *, whole: bool
    ) -> None:
        self._layout = layout
        self._depth = int(steps_per_call > 1)
        self._axis = batch_axis(accumulate, steps_per_call)
        self._accumulate = accumulate
        self._whole = whole
        self._is_spread = spans_processes(layout.mesh)
        # A single CPU device uses host memory: a program takes arrays as they are.
        devices = layout.mesh.devices
        self._in_place = devices.size == 1 and devices.flat[0].platform == "cpu"

    def put(self, batch: PyTree) -> PyTree:
        """Return the batch as global arrays in the placed layout."""
        if self._accumulate > 1:
            batch = jax.tree.map(self._cut, batch)
        if self._in_place and not _on_device(batch):
            return batch
        shardings = self._layout.batch_shardings(batch, axis=self._axis)
        if not self._is_spread:
            return jax.device_put(batch, shardings)
        if self._whole:
            return put(batch, shardings)
        return jax.tree.map(self._put_own, batch, jax.tree.broadcast(shardings, batch))

    def _put_own(self, leaf: np.ndarray | jax.Array, sharding: Sharding) -> jax.Array:
        """Put this process's parts; others may hold more of them, or fewer."""
        own, axis = np.asarray(leaf), self._axis
        rows = own.shape[axis] // parts_to_read(self._layout, whole=False)
        rows *= len(self._layout.batch_owners)
        shape = (*own.shape[:axis], rows, *own.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, own, shape)

    def _cut(self, leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        shape, depth = np.shape(leaf), self._depth
        rows = shape[depth] // self._accumulate
        cut = (*shape[:depth], self._accumulate, rows, *shape[depth + 1 :])
        return _local(leaf).reshape(cut)


def _on_device(batch: PyTree) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))


def stack_batches(batches: Sequence[PyTree]) -> PyTree:
    """Stack batches of one form along a new leading axis of steps.

    >>> stack_batches([{"x": np.zeros(4)}, {"x": np.ones(4)}])["x"].shape
    (2, 4)
    """
    return jax.tree.map(lambda *leaves: _stack(leaves), *batches)


def _checked_rows(
    batch: PyTree, layout: BatchLayout, accumulate: int, *, depth: int
) -> int:
    """Check that a global batch fits; return its number of examples."""
    _check_numbers(batch)
    rows = _batch_examples(batch, depth)
    checks.check_divides(
        rows,
        parts=len(layout.batch_owners),
        kind=name_of_parts(layout),
        accumulate=accumulate,
    )
    return rows


def _check_numbers(batch: PyTree) -> None:
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, Tracer):
            raise BatchError(
                "`batch` must hold arrays, got one that is traced: a compiled step is "
                "called under `jit` or `grad`. Call it directly."
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise BatchError(
                "`batch` must hold arrays that are still there, got one that a call "
                f"took over for `{path}`. Pass a copy."
            )
        dtype = getattr(leaf, "dtype", np.dtype(float))
        if not getattr(dtype, "isnative", True):
            raise BatchError(
                "`batch` must hold arrays in this machine's byte order, got "
                f"{dtype.str} for `{path}`. {checks.NATIVE_REMEDY}"
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu":
            checks.check_fits(leaf, path=path, name="batch")
        if not checks.holds_numbers(dtype) and not _is_key(dtype):
            raise BatchError(
                f"`batch` must hold arrays of numbers, got {describe(leaf)} for "
                f"`{path}`. Encode it as a numeric array, or leave it out."
            )


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.extended))


def _batch_examples(batch: PyTree, depth: int) -> int:
    sizes = {np.shape(leaf)[depth : depth + 1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        found = ", ".join(
            f"`{path}` {describe(leaf)}" if path else describe(leaf)
            for path, leaf in named_leaves(batch)
        )
        raise BatchError(
            "`batch` must hold arrays that agree in their batch axis, axis "
            f"{depth}, got {found or 'no arrays'}. Give each leaf one row per example."
        )
    return sizes.pop()[0]


def _stack(leaves: Sequence[np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
    if all(type(leaf) is np.ndarray for leaf in leaves):
        return np.stack(leaves)
    local = [_local(leaf) for leaf in leaves]
    if all(isinstance(leaf, jax.Array) for leaf in local):
        return jnp.stack(local)
    return np.stack(local)


def _local(leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    """Fetch an array that is sharded over devices; leave any other where it is.

    Reshaping it on its devices would launch a program on all of them from the input's
    thread, and two programs that reach devices in different orders may hang.
    """
    if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
        return leaf
    return np.asarray(leaf)
