"""Find the devices that hold the same piece of a leaf, and the copy that differs.

Which leaf has copies follows from its sharding alone: under data parallelism each
device has one, under `fsdp` none has a second, under `hybrid` pieces have copies across
one axis.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from replicator.base.padded import is_padded
from replicator.base.trees import named_leaves
from replicator.base.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A leaf of which a piece lies on two devices or more.

    Attributes:
      path: Path of the leaf.
      number: Index among all leaves.
      pieces: For each device of the mesh, in the order of `mesh.devices.flat`, the
        number of the piece that it holds.
    """

    path: str
    number: int
    pieces: tuple[int, ...]


def named_arrays(state: PyTree) -> list[tuple[str, Any]]:
    """List the leaves of a state as (path, array); a padded one is its padded array.

    >>> named_arrays({"w": 1.0})
    [('w', 1.0)]
    """
    return [
        (path, leaf.padded if is_padded(leaf) else leaf)
        for path, leaf in named_leaves(state, is_leaf=is_padded)
    ]


def copied(
    leaves: Sequence[tuple[str, Any]],
    mesh: Mesh,
    *,
    shardings: Sequence[Any] | None = None,
) -> tuple[list[Copied], list[str]]:
    """Return the leaves that have copies, and the paths of those that have none.

    Args:
      leaves: Path and array, or shape, of each.
      mesh: Mesh of the devices; what is not an array over it has no copies.
      shardings: Sharding of each leaf, for shapes; by default that of the array.
    """
    found: list[Copied] = []
    alone: list[str] = []
    for number, (path, leaf) in enumerate(leaves):
        own = (
            getattr(leaf, "sharding", None) if shardings is None else shardings[number]
        )
        pieces: tuple[int, ...] = ()
        if isinstance(own, NamedSharding) and own.mesh == mesh:
            pieces = _pieces(own, leaf.shape, mesh)
        if len(set(pieces)) < len(pieces):
            found.append(Copied(path=path, number=number, pieces=pieces))
        else:
            alone.append(path)
    return found, alone


def odd_copies(values: Sequence[Hashable], pieces: Sequence[int]) -> list[int]:
    """Return the devices whose copies differ from most copies of the same piece.

    Where no value is that of more than half of a piece's copies, all of them are odd.

    >>> odd_copies([7, 7, 9, 7], pieces=[0, 0, 0, 0])
    [2]
    >>> odd_copies([7, 5, 9, 5], pieces=[0, 1, 0, 1])
    [0, 2]

    Args:
      values: Fingerprint of what each device holds.
      pieces: Number of the piece that it holds.
    """
    odd: list[int] = []
    for piece in set(pieces):
        holders = [device for device, held in enumerate(pieces) if held == piece]
        ((common, times), *others) = Counter(
            values[device] for device in holders
        ).most_common()
        is_tie = 2 * times <= len(holders)
        odd += [d for d in holders if others and (is_tie or values[d] != common)]
    return sorted(odd)


def describe_place(mesh: Mesh, number: int) -> str:
    """Return the place of a device in a mesh: `replica 1, shard 2`.

    Axes of size 1 are left out.

    >>> describe_place(replicator.Replicator().mesh, 0).split()[0]
    'replica'
    """
    places = np.unravel_index(number, mesh.devices.shape)
    axes = zip(mesh.shape.items(), places, strict=True)
    return ", ".join(f"{axis} {place}" for (axis, size), place in axes if size > 1)


@functools.lru_cache(maxsize=4096)
def _pieces(
    sharding: NamedSharding, shape: tuple[int, ...], mesh: Mesh
) -> tuple[int, ...]:
    held = sharding.devices_indices_map(shape)
    numbers: dict[str, int] = {}
    return tuple(
        numbers.setdefault(str(held[device]), len(numbers))
        for device in mesh.devices.flat
    )
