"""Turn a function of one replica into one compiled program over a mesh's only axis.

Arguments are flat: a tuple of leaves, and for each the axis that is the devices'. The
program has one more output than the function, a byte for each device: what else it
returns may be donated to the next call, and somebody must be able to wait for it.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from replicator.base.types import PyTree
from replicator.compat.layout import WHOLE, axis_sharding, axis_spec
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What one program is for.

    Attributes:
      tree: Structure of `(arguments, keyword arguments)` without the static ones.
      static: The static arguments, as (position, value).
      size: Devices of this process.
    """

    tree: Any
    static: tuple[tuple[int, Hashable], ...]
    size: int


class MappedProgram:
    """A function over a leading device axis, compiled once for each set of shapes.

    Args:
      fn: What one replica does.
      call: How it is called.
      axes: For each leaf, which axis is the devices'; `WHOLE` for none.
      out_axes: Prefix of the result's tree; `WHOLE` for none.
      donated: For each leaf, whether the program may overwrite it.
      mesh: The devices.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        call: Call,
        axes: tuple[int, ...],
        *,
        out_axes: PyTree,
        donated: tuple[bool, ...],
        mesh: Mesh,
    ):
        self.mesh = mesh
        self.axes = axes
        mapped = jax.shard_map(
            _one_replica(fn, call, axes, out_axes),
            mesh=mesh,
            in_specs=tuple(axis_spec(mesh, axis) for axis in axes),
            out_specs=(
                jax.tree.map(lambda axis: axis_spec(mesh, axis), out_axes),
                axis_spec(mesh, 0),
            ),
            # As under `pmap`: gradients are those of one replica, and third-party scans
            # with a constant first carry are allowed.
            check_vma=False,
        )
        self.run = jax.jit(
            mapped,
            in_shardings=tuple(axis_sharding(mesh, axis) for axis in axes),
            donate_argnums=[i for i, is_donated in enumerate(donated) if is_donated],
        )
        self.run_traced = jax.jit(mapped)


def merge_static(
    args: Sequence[Any], static: Sequence[tuple[int, Hashable]]
) -> list[Any]:
    """Put static arguments back to their positions."""
    merged = list(args)
    for position, value in sorted(static, key=lambda pair: pair[0]):
        merged.insert(position, value)
    return merged


def _one_replica(
    fn: Callable[..., PyTree], call: Call, axes: tuple[int, ...], out_axes: PyTree
) -> Callable[..., tuple[PyTree, jax.Array]]:
    def one_replica(*rows: jax.Array) -> tuple[PyTree, jax.Array]:
        leaves = [
            row if axis == WHOLE else jax.lax.squeeze(row, (axis,))
            for row, axis in zip(rows, axes, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(call.tree, leaves)
        result = fn(*merge_static(args, call.static), **kwargs)
        return _with_axes(result, out_axes), jnp.zeros((1,), jnp.uint8)

    return one_replica


def _with_axes(result: PyTree, out_axes: PyTree) -> PyTree:
    try:
        axes = jax.tree.broadcast(out_axes, result)
    except ValueError as failure:
        raise ArgumentError(
            "`out_axes` must be a prefix of what the function returns, got "
            f"{out_axes} for {jax.tree.structure(result)}. Use 0 for all of it."
        ) from failure
    return jax.tree.map(
        lambda leaf, axis: (
            leaf if axis == WHOLE else jnp.expand_dims(jnp.asarray(leaf), axis)
        ),
        result,
        axes,
    )
