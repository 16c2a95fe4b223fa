"""Values at random, of every type that calls carry, and whether two are the same.

The same means: of the same types throughout, and equal bit for bit, so that NaN is the
same as itself and 0.0 is not the same as -0.0.
"""

import dataclasses
import datetime
import enum
import random
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import ml_dtypes
import numpy as np

from replicator.rpc.codec.no_argument_calls import NoArgumentCall
from replicator.rpc.codec.registry import Registry

REGISTRY = Registry()
"""Holds the classes below, and no others."""


@REGISTRY.register
class Point(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@REGISTRY.register
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that cannot be changed."""

    a: Any
    b: Any = 1


@REGISTRY.register
@dataclasses.dataclass
class Derived:
    """A dataclass that makes one of its fields."""

    a: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = [self.a, self.a]


@REGISTRY.register
class Color(enum.Enum):
    """An enum of values of several types."""

    RED = 1
    GREEN = "g"


@REGISTRY.register
class Level(enum.IntEnum):
    """An enum of numbers."""

    LOW = 1
    HIGH = 2


@REGISTRY.register
class Access(enum.Flag):
    """Flags, which may be set together."""

    READ = 1
    WRITE = 2
    RUN = 4


DTYPES = [
    *map(np.dtype, "?bBhHiIlLefdgFDG"),
    *map(np.dtype, (">i4", ">f8", ">u2", ">c8", ">U3", "S5", "U4", "V3", "V0", "U0")),
    *map(np.dtype, ("M8[s]", "m8[25us]", ">M8[D]", "M8", "m8[Y]")),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.bfloat16).newbyteorder(),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2),
    np.dtype(ml_dtypes.int4),
    np.dtype([("a", "<f4"), ("b", ">i2", (2, 3)), ("c", "?"), ("d", "U2")]),
    np.dtype([("x", [("y", "i1"), ("z", "f8")])], align=True),
    np.dtype([(("a title", "name"), "f4"), ("é", "S3")]),
    np.dtype({"names": ["p", "q"], "formats": ["i2", "f4"], "offsets": [6, 0]}),
    np.dtype([("float0", "V")]),
]
_ALPHABET = "abcXYZ 019\0\né€😀\ud800"


class RandomValues:
    """A stream of values that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._leaves: list[Callable[[], Any]] = [
            lambda: None,
            lambda: ...,
            lambda: self._rng.random() < 0.5,
            self._integer,
            self._float,
            lambda: complex(self._float(), self._float()),
            self._text,
            lambda: self._rng.randbytes(self._size(6000)),
            lambda: range(self._integer(), self._integer(), 1 + self._size(9)),
            self._time,
            lambda: self._rng.choice([*Color, *Level, *Access, Access(5), Access(0)]),
            self.array,
            self.array,
            self.array,
            lambda: self._scalar(self._rng.choice(DTYPES)),
            lambda: self._rng.choice(DTYPES),
        ]
        self._containers: list[Callable[[int], Any]] = [
            lambda depth: [self.value(depth) for _ in range(self._size(6))],
            lambda depth: tuple(self.value(depth) for _ in range(self._size(6))),
            lambda depth: {
                self._hashable(2): self.value(depth) for _ in range(self._size(6))
            },
            lambda depth: OrderedDict(
                (self._text(), self.value(depth)) for _ in range(self._size(4))
            ),
            lambda _: {self._hashable(2) for _ in range(self._size(6))},
            lambda _: frozenset(self._hashable(2) for _ in range(self._size(6))),
            lambda depth: Point(self.value(depth), self.value(depth)),
            lambda depth: Frozen(self.value(depth), b=self.value(depth)),
            lambda depth: Derived(self.value(depth)),
            lambda depth: slice(None, self.value(depth), self._integer()),
            self._call,
        ]

    def value(self, depth: int = 4) -> Any:
        """Return the next value, at most so many containers deep (and a little)."""
        if depth > 0 and self._rng.random() < 0.6:
            return self._rng.choice(self._containers)(depth - 1)
        return self._rng.choice(self._leaves)()

    def array(self) -> np.ndarray:
        """Return an array of any dtype, shape, order and contents."""
        dtype = self._rng.choice(DTYPES)
        shape = tuple(self._size(4) for _ in range(self._size(4)))
        if self._rng.random() < 0.1:
            shape = (self._rng.randrange(2000), 2)
        order: Literal["C", "F"] = self._rng.choice(("C", "F"))
        array = np.ndarray(shape, dtype, self._contents(dtype, shape), order=order)
        if array.ndim and self._rng.random() < 0.2:
            array = array[:: self._rng.choice((2, -1))]
        return array

    def bare_call(self) -> NoArgumentCall:
        """Return a call without arguments; it is no part of other values."""
        timeout_s = self._rng.choice((None, 60.0, 1, self._rng.random() + 0.1))
        return NoArgumentCall(self._text(), None, None, timeout_s)

    def _call(self, depth: int) -> list[Any]:
        """Return what looks like a call; some kinds have a way of their own."""
        args = self._rng.choice((None, [self.array()], [self.value(depth)]))
        timeout_s = self._rng.choice((None, 60.0, self._float(), self._integer()))
        return [self._text(), args, None, timeout_s]

    def _contents(self, dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
        """Return memory that an array of this dtype may have."""
        num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        if dtype.kind in "bU" or dtype.names is not None:
            return bytes(num_bytes)
        return self._rng.randbytes(num_bytes)

    def _scalar(self, dtype: np.dtype) -> Any:
        if dtype.kind == "U":
            return np.str_(self._text())
        if dtype.kind == "S":
            return np.bytes_(self._rng.randbytes(self._size(9)))
        return np.ndarray((), dtype, self._contents(dtype, ()))[()]

    def _hashable(self, depth: int) -> Any:
        if depth > 0 and self._rng.random() < 0.3:
            items = [self._hashable(depth - 1) for _ in range(self._size(3))]
            return self._rng.choice((tuple, frozenset))(items)
        make = (self._integer, self._float, self._text, self._time, lambda: Color.RED)
        return self._rng.choice(make)()

    def _integer(self) -> int:
        size = self._rng.choice((3, 7, 8, 15, 31, 32, 63, 64, 65, 300))
        return self._rng.choice((-1, 1)) * self._rng.getrandbits(size)

    def _float(self) -> float:
        special = (0.0, -0.0, float("inf"), float("nan"), 5e-324, 0.1)
        if self._rng.random() < 0.5:
            return self._rng.choice(special)
        return struct.unpack("<d", self._rng.randbytes(8))[0]

    def _text(self) -> str:
        return "".join(self._rng.choices(_ALPHABET, k=self._size(20)))

    def _time(self) -> Any:
        days = self._rng.randrange(1, 3_000_000)
        date = datetime.date.fromordinal(days)
        offset = datetime.timedelta(seconds=self._rng.randrange(-80_000, 80_000))
        zone = self._rng.choice(
            (
                None,
                datetime.UTC,
                datetime.timezone(offset),
                datetime.timezone(offset, "X"),
            )
        )
        time = datetime.time(23, 59, 1, days % 1_000_000, zone, fold=days % 2)
        moment = datetime.datetime.combine(date, time)
        duration = datetime.timedelta(days - 1_000_000, microseconds=days)
        return self._rng.choice((date, moment, duration))

    def _size(self, end: int) -> int:
        """Return a number below `end`; small ones are likelier."""
        return int(self._rng.random() ** 2 * end)


def is_same(a: Any, b: Any) -> bool:
    """Return whether `b` equals `a`."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.void) and a.dtype.names:
        names = a.dtype.names  # what lies between fields is nobody's
        return a.dtype == b.dtype and all(is_same(a[name], b[name]) for name in names)
    if isinstance(a, np.ndarray):
        return _layout(a) == _layout(b) and a.tobytes("A") == b.tobytes("A")
    if isinstance(a, np.generic) and not isinstance(a, np.str_ | np.bytes_):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return is_same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, dict):
        return is_same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(is_same(x, y) for y in b) for x in a)
    if isinstance(a, slice):
        return is_same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return all(is_same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, np.dtype):
        return a == b and a.str == b.str
    if isinstance(a, jax.Array):
        return a.dtype == b.dtype and bool((a == b).all())
    return repr(a) == repr(b)


def _layout(array: np.ndarray) -> tuple:
    is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return array.dtype, array.dtype.str, array.shape, is_fortran
