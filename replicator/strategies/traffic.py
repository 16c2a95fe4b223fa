"""Collectives of a step: bytes that a device sends, and the groups they go over."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind in a step, over the same groups of devices.

    Attributes:
      kind: XLA's name of the kind: `"all-reduce"`, `"all-gather"`, ...
      axes: Mesh axes along which the devices of a group lie.
      wire_bytes: Number of bytes that one device sends in all of them, over a ring.
      stride: Number of places from a device of a group to the next.
      span: Number of places from the first device of a group to behind the last.
      count: Number of such collectives in a step.
    """

    kind: str
    axes: tuple[str, ...]
    wire_bytes: int
    stride: int
    span: int
    count: int = 1


def traffic_over(
    kind: str,
    axes: Sequence[str],
    mesh: Mapping[str, int],
    wire_bytes: int,
    count: int = 1,
) -> Traffic:
    """Return collectives along axes of a mesh, the last axis side by side.

    Args:
      kind: XLA's name of the kind.
      axes: Axes; all of the mesh if none is known.
      mesh: Size of each axis, in their order.
      wire_bytes: Number of bytes that one device sends in all of them.
      count: Number of collectives.

    >>> over = traffic_over("all-gather", ("shard",), {"shard": 4, "model": 2}, 100)
    >>> over.stride, over.span
    (2, 8)
    """
    names, sizes = list(mesh), list(mesh.values())
    strides = {n: math.prod(sizes[i + 1 :]) for i, n in enumerate(names)}
    used = [name for name in axes or names if mesh[name] > 1]
    return Traffic(
        kind=kind,
        axes=tuple(axes),
        wire_bytes=wire_bytes,
        stride=min((strides[name] for name in used), default=1),
        span=max((strides[name] * mesh[name] for name in used), default=1),
        count=count,
    )


def together(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Add up collectives of the same kind over the same groups.

    >>> one = traffic_over("all-gather", ["shard"], {"shard": 4}, 100)
    >>> [(each.wire_bytes, each.count) for each in together([one, one])]
    [(200, 2)]
    """
    found: dict[Any, Traffic] = {}
    for each in traffic:
        same = (each.kind, each.axes, each.stride, each.span)
        known = found.get(same)
        found[same] = (
            each
            if known is None
            else replace(
                known,
                wire_bytes=known.wire_bytes + each.wire_bytes,
                count=known.count + each.count,
            )
        )
    return tuple(found.values())
