"""Method by which replicas add up one gradient, and the bytes that it sends.

A method is data: what a rule of a strategy selects for a variable, and the number of
devices of a host. All that is decided by shapes is decided here, so that a forecast and
a traced step agree.
"""

import dataclasses
import math
import re
from typing import Any, Literal, get_args

from jax.typing import DTypeLike

from replicator.collectives.precision import sum_dtype, wire_dtype
from replicator.errors import ArgumentError, check_word

Synchronise = Literal["all_reduce", "hierarchical", "rows"]
"""Way of a sum: over all replicas at once; within hosts, then between them; or of the
rows of an embedding that are not zero."""

BLOCK = 256
"""Number of int8 values that share a scale, as in Dettmers et al. 2022, "8-bit
Optimizers via Block-wise Quantization", §2.1, with smaller blocks."""

_SCALE_BYTES = 4
_INDEX_BYTES = 4
_NARROW_BYTES = {"bf16": 2, "f16": 2, "int8": 1}
_POWER_SGD = re.compile(r"power_sgd\((\d+)\)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SumMethod:
    """Way in which replicas add up the gradient of one variable.

    Attributes:
      synchronise: Way of the sum.
      compress: Form in which numbers travel: None as they are, `"bf16"`, `"f16"`,
        `"int8"`, or `"power_sgd(rank)"`.
      devices_per_host: Number of devices that fast links join; for `"hierarchical"`.
    """

    synchronise: Synchronise = "all_reduce"
    compress: str | None = None
    devices_per_host: int | None = None

    @property
    def rank(self) -> int | None:
        """Rank of PowerSGD's approximation; None for another form."""
        return _rank(self.compress)

    def inside(self, num_replicas: int) -> int:
        """Return the number of replicas of a host, whose links are fast.

        >>> SumMethod(synchronise="hierarchical", devices_per_host=4).inside(8)
        4
        """
        if self.synchronise != "hierarchical":
            return 1
        return min(self.devices_per_host or 1, num_replicas)

    def narrows(self, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
        """Return whether this form is smaller than an array, on any replica count.

        Then something may be owed of it, and the optimizer's state has a place for it.

        >>> SumMethod(compress="bf16").narrows((8, 8), "bfloat16")
        False
        >>> SumMethod(compress="power_sgd(2)").narrows((8,), "float32")
        False
        """
        itemsize = wire_dtype(dtype).itemsize
        if self.rank:
            smaller = self.rank * sum(matrix_shape(shape)) * sum_dtype(dtype).itemsize
            return len(shape) > 1 and smaller < math.prod(shape) * itemsize
        return self.compress is not None and _NARROW_BYTES[self.compress] < itemsize


def check_method(synchronise: Any, compress: Any) -> None:
    """Refuse words that are no way of a sum, or no form of numbers.

    Raises:
      ArgumentError: One is not, or they do not go together.

    >>> check_method("hierarchical", "power_sgd(4)")
    """
    check_word("synchronise", synchronise, get_args(Synchronise))
    known = compress is None or compress in _NARROW_BYTES
    if not known and not (isinstance(compress, str) and _rank(compress)):
        raise ArgumentError(
            "`compress` must be None, 'bf16', 'f16', 'int8' or 'power_sgd(rank)', "
            f"got {compress!r}. Write for example 'power_sgd(4)'."
        )
    if synchronise == "rows" and compress is not None:
        raise ArgumentError(
            f"`compress` must be None with `synchronise='rows'`, got {compress!r}. "
            "Leave it out: rows travel as they are."
        )


def _rank(compress: str | None) -> int | None:
    found = _POWER_SGD.fullmatch(compress or "")
    return int(found[1]) if found else None


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a weight as a matrix: its last dimension is that of outputs.

    >>> matrix_shape((3, 3, 16, 32))
    (144, 32)
    """
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def shrinks(
    method: SumMethod, shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int
) -> bool:
    """Return whether numbers travel in the form of `method`, or whole.

    >>> int8 = SumMethod(compress="int8")
    >>> shrinks(int8, (64, 64), "float32", 8), shrinks(int8, (3,), "float32", 8)
    (True, False)
    """
    if not method.narrows(shape, dtype):
        return False
    groups = num_replicas // method.inside(num_replicas)
    if groups == 1:
        return False
    whole = dataclasses.replace(method, compress=None)
    sizes = (shape, dtype, num_replicas)
    return _across_bytes(method, *sizes) < _across_bytes(whole, *sizes)


def rows_shrink(
    shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int, rows: int | None
) -> bool:
    """Return whether so many rows of each replica are fewer bytes than the whole table.

    >>> rows_shrink((4096, 64), "float32", 8, rows=16)
    True
    """
    if rows is None or num_replicas == 1:
        return False
    sent = _rows_bytes(shape, dtype, num_replicas, rows)
    return sent < _all_reduce_bytes(shape, dtype, num_replicas)


def sent_bytes(
    method: SumMethod,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_replicas: int,
    *,
    rows: int | None = None,
) -> int:
    """Return the bytes that one device sends to add up a gradient, over rings.

    Args:
      method: Method of the sum.
      shape: Shape of the gradient.
      dtype: Dtype of the gradient.
      num_replicas: Number of replicas.
      rows: Most rows that a replica's gradient has; None if it is dense.

    >>> sent_bytes(SumMethod(), (256, 256), "float32", 8)
    458752
    >>> sent_bytes(SumMethod(compress="int8"), (256, 256), "float32", 8)
    116480
    >>> sent_bytes(SumMethod(compress="power_sgd(4)"), (256, 256), "float32", 8)
    14336
    """
    return sum(sent_by_level(method, shape, dtype, num_replicas, rows=rows))


def sent_by_level(
    method: SumMethod,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    num_replicas: int,
    *,
    rows: int | None = None,
) -> tuple[int, int]:
    """Return the bytes of `sent_bytes` within a host, and between hosts.

    Where there is one level, all of them are between.

    >>> hosts = SumMethod(synchronise="hierarchical", devices_per_host=4)
    >>> sent_by_level(hosts, (256, 256), "float32", 8)
    (589824, 65536)
    """
    if method.synchronise == "rows" and rows_shrink(shape, dtype, num_replicas, rows):
        assert rows is not None
        return 0, _rows_bytes(shape, dtype, num_replicas, rows)
    inside_dtype = dtype
    if not shrinks(method, shape, dtype, num_replicas):
        method = dataclasses.replace(method, compress=None)
    elif not method.rank:
        # Shares of the update are added in float32, also within a host.
        inside_dtype = sum_dtype(dtype)
    if method.rank:
        plain = dataclasses.replace(method, compress=None)
        inside, across = zip(
            *(
                sent_by_level(
                    plain, (side, method.rank), sum_dtype(dtype), num_replicas
                )
                for side in matrix_shape(shape)
            ),
            strict=True,
        )
        return sum(inside), sum(across)
    across = _across_bytes(method, shape, dtype, num_replicas)
    return _inside_bytes(method, shape, inside_dtype, num_replicas), across


def piece_of(size: int, pieces: int) -> int:
    """Return the size of equal pieces of an array, padded.

    >>> piece_of(10, 4)
    3
    """
    return -(-size // pieces)


def _across_bytes(
    method: SumMethod, shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int
) -> int:
    """Return the bytes sent between hosts, or between all where there is one level."""
    inside = method.inside(num_replicas)
    groups, size = num_replicas // inside, math.prod(shape)
    if inside > 1:
        size = piece_of(size, inside)
    if method.compress is None or method.rank:
        rank = method.rank
        if rank:
            size, dtype = rank * sum(matrix_shape(shape)), sum_dtype(dtype)
        return _all_reduce_bytes((size,), dtype, groups)
    own = piece_of(size, groups)
    payload = own * _NARROW_BYTES[method.compress]
    if method.compress == "int8":
        payload += _SCALE_BYTES * piece_of(own, BLOCK)
    return 2 * (groups - 1) * payload


def _inside_bytes(
    method: SumMethod, shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int
) -> int:
    """Return the bytes sent within a host; 0 where there is one level."""
    inside = method.inside(num_replicas)
    if inside == 1:
        return 0
    piece = piece_of(math.prod(shape), inside) * wire_dtype(dtype).itemsize
    gathered = (inside - 1) * piece if inside < num_replicas else 0
    return _all_reduce_bytes(shape, dtype, inside) + gathered


def _all_reduce_bytes(
    shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int
) -> int:
    whole = math.prod(shape) * wire_dtype(dtype).itemsize
    return 2 * whole * (num_replicas - 1) // num_replicas


def _rows_bytes(
    shape: tuple[int, ...], dtype: DTypeLike, num_replicas: int, rows: int
) -> int:
    row = math.prod(shape[1:]) * wire_dtype(dtype).itemsize
    return (num_replicas - 1) * rows * (row + _INDEX_BYTES)
