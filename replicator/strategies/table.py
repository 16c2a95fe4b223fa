"""Print a strategy for the variables of a state: partitions, and bytes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from replicator.strategies.strategy import Cut, Strategy, padded_shape
from replicator.strategies.variables import Variable


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """One variable under a strategy.

    Attributes:
      path: Its path.
      nbytes: Number of bytes of the whole array, without padding.
      stored: Mesh axis of each dimension.
      device_bytes: Number of bytes on each device between steps, with padding.
      wire_bytes: Number of bytes that a device sends for it in a step, if collectives
        are rings: gathered where it is used, forward and backward; its gradient
        scattered, or summed whole. Tensor-parallel activations are not counted.
    """

    path: str
    nbytes: int
    stored: Cut
    device_bytes: int
    wire_bytes: int


def rows(
    strategy: Strategy, variables: Sequence[Variable], num_devices: int
) -> list[TableRow]:
    """Return a row for each variable.

    >>> w = Variable(path="w", shape=(64, 64), dtype="float32", follows="w")
    >>> [row] = rows(Strategy(name="mine"), [w], 8)
    >>> row.nbytes, row.device_bytes
    (16384, 16384)
    """
    sizes = strategy.sizes(num_devices)
    return [_row(strategy, each, sizes) for each in variables]


def table(strategy: Strategy, variables: Sequence[Variable], num_devices: int) -> str:
    """Return the rows as text, with a line of sums.

    Raises:
      ArgumentError: The strategy does not fit the devices or a variable.

    >>> w = Variable(path="w", shape=(64, 64), dtype="float32", follows="w")
    >>> print(table(Strategy(name="mine"), [w], num_devices=8).splitlines()[0])
    variable  bytes   partition  bytes/device  wire bytes/step
    """
    found = rows(strategy, variables, num_devices)
    lines: list[tuple[str, ...]] = [
        ("variable", "bytes", "partition", "bytes/device", "wire bytes/step")
    ]
    for row in found:
        cut = (
            ",".join(axis or "-" for axis in row.stored) if any(row.stored) else "whole"
        )
        numbers = [f"{n:,}" for n in (row.nbytes, row.device_bytes, row.wire_bytes)]
        lines.append((row.path, numbers[0], cut, *numbers[1:]))
    sums = [
        f"{sum(getattr(row, name) for row in found):,}"
        for name in ("nbytes", "device_bytes", "wire_bytes")
    ]
    lines.append(("all", sums[0], strategy.name, *sums[1:]))
    return "\n".join(aligned(lines, numbers=(1, 3, 4)))


def aligned(rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> list[str]:
    """Return rows of a table as lines, with the columns `numbers` aligned to the right.

    >>> aligned([("w", "16,384"), ("bias", "64")], numbers=[1])
    ['w     16,384', 'bias      64']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n in numbers else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(strategy: Strategy, variable: Variable, sizes: dict[str, int]) -> TableRow:
    placed = strategy.place(variable, sizes)
    kept = _padded(variable, [placed.stored], sizes)
    return TableRow(
        path=variable.path,
        nbytes=variable.nbytes,
        stored=placed.stored,
        device_bytes=kept.nbytes // _pieces(placed.stored, sizes),
        wire_bytes=sum(each[-1] for each in sent(strategy, variable, sizes)),
    )


def sent(
    strategy: Strategy, variable: Variable, sizes: dict[str, int]
) -> list[tuple[str, tuple[str, ...], int, int]]:
    """Return the collectives of a step for a variable.

    Returns:
      Their kind, mesh axes, number, and the bytes that a device sends in them, if they
      are rings; none for the state of an optimizer.

    >>> w = Variable(path="w", shape=(64, 64), dtype="float32", follows="w")
    >>> mine = Strategy(name="mine", replica=8)
    >>> sent(mine, w, mine.sizes(8))
    [('all-reduce', ('replica',), 1, 28672)]
    """
    if variable.is_optimizer:
        return []
    placed = strategy.place(variable, sizes)
    moments = strategy.place(replace(variable, path="", is_optimizer=True), sizes)
    cuts = [placed.stored, placed.computed, placed.gradient, moments.stored]
    variable = _padded(variable, cuts, sizes)
    stored, computed = (_pieces(c, sizes) for c in (placed.stored, placed.computed))
    part = variable.nbytes // computed
    # A ring moves (n-1)/n of the result to gather, and as much to scatter.
    gathered = 2 * (part - variable.nbytes // stored)
    over = math.prod(sizes[axis] for axis in strategy.batch_axes)
    cut = max(_pieces(placed.gradient, sizes) // computed, 1)
    scattered = part - part // cut
    summed = 2 * (part // cut) * (over // cut - 1) // max(over // cut, 1)
    # Parameters that are stored whole, and updated in pieces, are gathered afterwards.
    updated = max(_pieces(moments.stored, sizes) // stored, 1)
    kept = variable.nbytes // stored * (updated - 1) // updated

    def axes(named: Iterable[str | None], less: Iterable[str | None] = ()) -> tuple:
        return tuple(a for a in sizes if a in {*named} - {*less} and sizes[a] > 1)

    scatter_axes = axes(placed.gradient, placed.computed)
    found = [
        ("all-gather", axes(placed.stored, placed.computed), 2, gathered),
        ("reduce-scatter", scatter_axes, 1, scattered),
        ("all-reduce", axes(strategy.batch_axes, scatter_axes), 1, summed),
        ("all-gather", axes(moments.stored, placed.stored), 1, kept),
    ]
    return [each for each in found if each[-1] > 0]


def _padded(variable: Variable, cuts: Sequence[Cut], sizes: dict[str, int]) -> Variable:
    """Return a variable as large as it is where it is cut in these ways."""
    shape = variable.shape
    for cut in cuts:
        shape = padded_shape(shape, cut, sizes)
    return replace(variable, shape=shape)


def _pieces(cut: Cut, sizes: dict[str, int]) -> int:
    return math.prod(sizes[axis] for axis in cut if axis)
