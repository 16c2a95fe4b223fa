"""Groups of devices of a collective, and the axes of the mesh along which they lie."""

import functools
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

from replicator.engine.inspection.hlo_text import Instruction

Groups = Sequence[Sequence[int]]
"""Places of devices in the mesh, in the order of its devices; a group meets apart."""


def device_groups(instruction: Instruction, num_devices: int) -> Groups:
    """Return the groups of devices of a collective; of a permutation its pairs.

    XLA writes them in four ways: `{{0,1},{2,3}}`, `{}` for all devices in one,
    `[2,4]<=[4,2]T(1,0)` and `mesh['shard'=4,'model'=2] {'shard'}`.
    """
    attributes = instruction.attributes
    if found := re.search(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return _listed(found[1])
    if found := re.search(r"replica_groups=\{((?:\{[\d, ]*\},? ?)*)\}", attributes):
        return _listed(found[1]) or [range(num_devices)]
    if found := _IOTA.search(attributes):
        return _iota(*found.groups()).tolist()
    if found := _MESH.search(attributes):
        return _along(*found.groups())
    return [range(num_devices)]


_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(?([^{]*?)\)?)? ?\{([^}]*)\}"
)


def _listed(text: str) -> list[list[int]]:
    return [
        [int(place) for place in group.split(",") if place.strip()]
        for group in re.findall(r"\{([^}]*)\}", text)
    ]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _iota(shape: str, sizes: str, order: str | None) -> np.ndarray:
    places = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    if order is not None:
        places = places.transpose(_numbers(order))
    return places.reshape(_numbers(shape))


def _along(axes: str, devices: str | None, joined: str) -> list[list[int]]:
    """Return groups along axes, or parts of axes, of a mesh that XLA has named.

    Args:
      axes: `'a'=2,'b'=4`.
      devices: `[4,2]T(1,0)`, or a list; None for devices in their order.
      joined: `'a'`, or `'b':(1)2` for the part of size 2 before which is a part of 1.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    total = math.prod(sizes.values())
    places = np.arange(total)
    if devices and (found := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$", devices)):
        places = _iota(str(total), found[1], found[2])
    elif devices and re.fullmatch(r"[\d,]+", devices):
        places = np.array(_numbers(devices))
    names = [
        (name, int(before or 1), int(size or sizes[name] // int(before or 1)))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", joined)
    ]
    # An axis of which a part is joined is written as three: before, the part, behind.
    parts: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        cuts = sorted((before, width) for own, before, width in names if own == name)
        done = 1
        for before, width in cuts:
            parts += [(before // done, False), (width, True)]
            done = before * width
        parts.append((size // done, False))
    grid = places.reshape([size for size, _ in parts])
    inside = [n for n, (_, is_joined) in enumerate(parts) if is_joined]
    outside = [n for n, (_, is_joined) in enumerate(parts) if not is_joined]
    width = math.prod(parts[n][0] for n in inside)
    return grid.transpose(outside + inside).reshape(-1, width).tolist()


def mesh_axes(groups: Groups, sizes: dict[str, int]) -> tuple[str, ...]:
    """Return the fewest axes of a mesh along which the devices of each group lie.

    >>> mesh_axes([[0, 1], [2, 3]], {"replica": 2, "shard": 2})
    ('shard',)
    """
    return _mesh_axes(tuple(tuple(group) for group in groups), tuple(sizes.items()))


@functools.cache
def _mesh_axes(
    groups: tuple[tuple[int, ...], ...], sizes: tuple[tuple[str, int], ...]
) -> tuple[str, ...]:
    names = [name for name, size in sizes if size > 1]
    shape = [size for _, size in sizes]
    total = math.prod(shape)
    if any(place >= total for group in groups for place in group):
        return ()
    at = np.stack(np.unravel_index(np.arange(total), shape), axis=1)
    for count in range(len(names) + 1):
        for chosen in itertools.combinations(names, count):
            fixed = [n for n, (name, _) in enumerate(sizes) if name not in chosen]
            if all(
                np.ptp(at[list(group)][:, fixed], axis=0).max(initial=0) == 0
                for group in groups
                if group
            ):
                return chosen
    return ()
