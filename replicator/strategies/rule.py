"""A rule: how the variables of some paths lie on devices, and how gradients add up.

A partition names the mesh axes along which the dimensions of an array are cut: `()`
whole; `(None, "model")` the second dimension over `model`; `"shard"` the largest
dimension that divides over `shard`, the first of equals: its pieces are contiguous. If
none does, a rule may have the largest padded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from replicator.collectives.synchronise.method import Synchronise, check_method
from replicator.errors import ArgumentError, check_text, check_word

Partition = str | tuple[str | None, ...]
Cut = tuple[str | None, ...]
"""The mesh axis of each dimension of one array."""

AXES = ("replica", "shard", "model")

Uneven = Literal["whole", "refuse", "pad"]
"""Treatment of a variable that does not divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Partitions of the variables whose path matches a pattern.

    Attributes:
      pattern: Pattern of the parameter's path, as `fnmatch`: `*` matches slashes too.
      stored: Partition between uses.
      computed: Partition where it is multiplied; whole by default.
      gradient: Partition of its gradient; None for that of the optimizer's state.
      optimizer: Partition of the optimizer's state for it; None for `stored`.
      uneven: Treatment of a variable that does not divide: left `"whole"`, `"refuse"`d,
        or cut with padding behind it: `"pad"`.
      synchronise: Way in which replicas add up its gradient: `"all_reduce"`,
        `"hierarchical"` or `"rows"`; where a strategy replicates.
      compress: Form in which its gradient travels: None as it is, `"bf16"`, `"f16"`,
        `"int8"` or `"power_sgd(rank)"`; likewise.
    """

    pattern: str
    stored: Partition = ()
    computed: Partition = ()
    gradient: Partition | None = None
    optimizer: Partition | None = None
    uneven: Uneven = "whole"
    synchronise: Synchronise = "all_reduce"
    compress: str | None = None

    def __post_init__(self) -> None:
        check_text("pattern", self.pattern)
        check_method(self.synchronise, self.compress)
        check_word("uneven", self.uneven, get_args(Uneven))
        for name in ("stored", "computed", "gradient", "optimizer"):
            partition = _checked(name, getattr(self, name))
            if partition is None and name in ("stored", "computed"):
                raise ArgumentError(
                    f"`{name}` must be a partition, got None. Write `()` for whole."
                )
            object.__setattr__(self, name, partition)

    @property
    def partitions(self) -> bool:
        """Whether it cuts anything."""
        return self != replace(
            self, stored=(), computed=(), gradient=None, optimizer=None, uneven="whole"
        )

    @property
    def synchronises(self) -> bool:
        """Whether it has replicas add up in another way than by an all-reduce."""
        return (self.synchronise, self.compress) != ("all_reduce", None)


def axes_of(partition: Partition | None) -> list[str]:
    """List the mesh axes that a partition names.

    >>> axes_of((None, "model"))
    ['model']
    """
    if isinstance(partition, str):
        return [partition]
    return [axis for axis in partition or () if axis is not None]


def _checked(name: str, partition: Any) -> Partition | None:
    """Return a partition with its dimensions in a tuple, from any list of them.

    Raises:
      ArgumentError: It is not a partition, names an unknown axis, or one axis twice.
    """
    if partition is not None and not isinstance(partition, str):
        if not isinstance(partition, Iterable):
            raise ArgumentError(
                f"`{name}` must be a partition, got {partition!r}. Write for example "
                '`(None, "model")`.'
            )
        partition = tuple(partition)
    axes = axes_of(partition)
    for axis in axes:
        check_word(name, axis, AXES)
        if axes.count(axis) > 1:
            raise ArgumentError(
                f"`{name}` must name each mesh axis once, got {partition!r}. Cut one "
                "dimension by it."
            )
    return partition
