"""Values that msgpack has no type for, as lists that begin with a tag.

A new one is a function that takes it apart, one that builds it, and a line in the table
of each. The latter is called with untrusted parts: it checks them, or calls a function
that does; whatever it raises, the codec raises as `DecodeError`.
"""

import datetime
import enum
import itertools
import reprlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from msgpack import ExtType

from replicator.errors import DecodeError, EncodeError
from replicator.rpc.codec.array_headers import describe, described
from replicator.rpc.codec.head_bounds import check_hashes
from replicator.rpc.codec.registry import Entry, Registry
from replicator.rpc.codec.wire_format import TAG
from replicator.rpc.unsent_functions import NotSent

Parts = list[Any]
Build = Callable[[Parts, Registry], Any]
_MOST_FLAGS = 65_536


class Tag:
    """A tag at the receiver, until its list is complete."""

    __slots__ = ("build",)

    def __init__(self, build: Build) -> None:
        self.build = build


TAGS: dict[bytes, Tag] = {}


def _tag(letter: bytes, build: Build) -> ExtType:
    TAGS[letter] = Tag(build)
    return ExtType(TAG, letter)


def plain_parts(value: Any) -> Parts | None:
    """Take a value of Python's own types apart; None: it is of another type.

    Raises:
      EncodeError: A part of it cannot be sent.

    >>> plain_parts(range(3))[1:]
    [0, 3, 1]
    """
    apart = _APART.get(type(value))
    return None if apart is None else apart(value)


def registered_parts(value: Any, entry: Entry) -> Parts:
    """Take an instance of a registered class apart.

    Raises:
      EncodeError: It cannot be sent.
    """
    match entry.kind:
        case "dataclass" | "namedtuple" | "mapping":
            return [_OBJECT, entry.name, *itertools.chain(*entry.parts(value))]
        case "enum":
            if entry.cls.__members__.get(value.name) is value:
                return [_MEMBER, entry.name, value.name]
            return [_FLAGS, entry.name, value.value]
        case "exception":
            raise EncodeError(
                f"an exception ({entry.name}). Raise it, or send its text"
            )


def numpy_parts(value: np.str_ | np.bytes_ | np.dtype) -> Parts:
    """Take apart what NumPy has beside arrays and numbers.

    Raises:
      EncodeError: It is the dtype of arrays that cannot be sent.
    """
    if isinstance(value, np.dtype):
        return [_DTYPE, describe(value)]
    if isinstance(value, np.str_):
        return [_NUMPY_STR, str(value)]
    return [_NUMPY_BYTES, bytes(value)]


def key_parts(key: Any, jax: Any) -> Parts:
    """Take a typed JAX key (or an array of them) apart.

    Raises:
      EncodeError: Its implementation has no name.
    """
    is_key = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    implementation = jax.random.key_impl(key) if is_key else None
    if type(implementation) is not str:
        raise EncodeError("a key of an implementation of your own. Send its key data")
    return [_KEY, implementation, np.asarray(jax.random.key_data(key))]


def _set(parts: Parts, _: Registry) -> set:
    check_hashes(parts)
    found = set(parts)
    if len(found) != len(parts):
        raise DecodeError("A set must have each element once.")
    return found


def _float_pair(parts: Parts, _: Registry) -> complex:
    real, imaginary = parts
    if not type(real) is type(imaginary) is float:
        raise DecodeError("A complex number must be of two floats.")
    return complex(real, imaginary)


def _moment_parts(moment: datetime.datetime) -> Parts:
    zone = moment.tzinfo
    if not (zone is None or type(zone) is datetime.timezone):
        raise EncodeError(f"a time in zone {zone}. Send it in UTC")
    offset = None if zone is None else zone.utcoffset(None)
    name = None if zone is None else zone.tzname(None)
    if offset is not None and datetime.timezone(offset).tzname(None) == name:
        name = None
    fields = moment.timetuple()[:6]
    return [_MOMENT, *fields, moment.microsecond, moment.fold, offset, name]


def _moment(parts: Parts, _: Registry) -> datetime.datetime:
    *fields, fold, offset, name = parts
    _check_integers(fields)
    zone = None
    if offset is not None:
        zone = (
            datetime.timezone(offset)
            if name is None
            else datetime.timezone(offset, name)
        )
    return datetime.datetime(*fields, tzinfo=zone, fold=fold)


def _object(parts: Parts, registry: Registry) -> Any:
    name, *rest = parts
    entry = _entry(registry, name, ("dataclass", "namedtuple", "mapping"))
    fields = dict(zip(rest[::2], rest[1::2], strict=True))
    if not fields.keys() == set(entry.fields) or 2 * len(fields) != len(rest):
        raise DecodeError(
            f"{name!r} must have the fields {list(entry.fields)}, got "
            f"{reprlib.repr(rest[::2])}. Run the same version at both ends."
        )
    cls: Any = entry.cls
    if entry.kind == "mapping":
        if type(fields["items"]) is not dict:  # hashes of others were not checked
            raise DecodeError(f"{name!r} must be of a dictionary.")
        return cls(fields["items"])
    if entry.kind == "namedtuple":
        return cls._make(map(fields.__getitem__, entry.fields))
    taken = {key: fields[key] for key in entry.fields if key not in entry.set_later}
    built = cls(**taken)
    # What `__post_init__` made of them was made once already.
    for field, value in fields.items():
        object.__setattr__(built, field, value)
    return built


def _member(parts: Parts, registry: Registry) -> enum.Enum:
    name, member = parts
    found = _entry(registry, name, ("enum",)).cls.__members__.get(member)
    if found is None:
        raise DecodeError(
            f"A member of {name!r} must be known at both ends, got "
            f"{reprlib.repr(member)}. Run the same version there."
        )
    return found


def _flags(parts: Parts, registry: Registry) -> enum.Flag:
    name, bits = parts
    cls = _entry(registry, name, ("enum",)).cls
    if type(bits) is not int or bits < 0 or bits & ~getattr(cls, "_flag_mask_", 0):
        raise DecodeError(f"{name!r} must be of bits that its members name.")
    # A class keeps what it makes of bits, for good.
    if bits not in (kept := cls._value2member_map_) and len(kept) >= _MOST_FLAGS:
        raise DecodeError(f"{name!r} has arrived in {_MOST_FLAGS:,} combinations.")
    return cls(bits)


def _entry(registry: Registry, name: Any, kinds: tuple[str, ...]) -> Entry:
    entry = registry.entry_named(name) if type(name) is str else None
    if entry is None or entry.kind not in kinds:
        raise DecodeError(
            f"A class must be registered to arrive, got {reprlib.repr(name)}. Register "
            "it with `rpc.register`, at both ends; import optax and flax there, whose "
            "states need not be registered."
        )
    return entry


def _key(parts: Parts, _: Registry) -> Any:
    implementation, data = parts
    jax = sys.modules.get("jax")
    if jax is None:
        raise DecodeError("A JAX key arrived where JAX is not. Import jax there first.")
    is_data = type(data) is np.ndarray and data.dtype == np.uint32
    if type(implementation) is not str or not is_data:
        raise DecodeError("A JAX key must be of whole numbers and an implementation.")
    return jax.random.wrap_key_data(data, impl=implementation)


def _alone(make: Callable[[Any], Any], kind: type | tuple[type, ...]) -> Build:
    """Put together what has one part, of a certain type."""

    def build(parts: Parts, _: Registry) -> Any:
        (part,) = parts
        if not isinstance(part, kind):
            raise DecodeError(f"Expected {kind}, got {type(part).__name__}.")
        return make(part)

    return build


def _check_integers(parts: Parts) -> Parts:
    """Refuse other parts; NumPy's and `bytes` mean something else to constructors."""
    if set(map(type, parts)) - {int}:
        raise DecodeError(f"Expected whole numbers, got {reprlib.repr(parts)}.")
    return parts


TUPLE = _tag(b"t", lambda parts, _: tuple(parts))
TUPLE_TAG = TAGS[TUPLE.data]
_SET = _tag(b"s", _set)
_FROZENSET = _tag(b"f", lambda parts, registry: frozenset(_set(parts, registry)))
_ORDERED = _tag(b"o", _alone(OrderedDict, dict))
_INTEGER = _tag(
    b"i", _alone(lambda data: int.from_bytes(data, "little", signed=True), bytes)
)
_COMPLEX = _tag(b"c", _float_pair)
_ELLIPSIS = _tag(b".", lambda parts, _: _nothing(parts))
_RANGE = _tag(b"r", lambda parts, _: range(*_check_integers(parts)))
_SLICE = _tag(b":", lambda parts, _: slice(*parts))
_DATE = _tag(b"d", _alone(datetime.date.fromordinal, int))
_MOMENT = _tag(b"m", _moment)
_DURATION = _tag(b"u", lambda parts, _: datetime.timedelta(*_check_integers(parts)))
_OBJECT = _tag(b"O", _object)
_MEMBER = _tag(b"E", _member)
_FLAGS = _tag(b"F", _flags)
_NUMPY_STR = _tag(b"S", _alone(np.str_, str))
_NUMPY_BYTES = _tag(b"B", _alone(np.bytes_, bytes))
_DTYPE = _tag(b"D", _alone(described, (str, list)))
_KEY = _tag(b"K", _key)
_NOT_SENT = _tag(b"N", _alone(NotSent, str))


def _nothing(parts: Parts) -> Any:
    if parts:
        raise DecodeError("`...` must have no parts.")
    return ...


def _integer_parts(value: int) -> Parts:
    return [
        _INTEGER,
        value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
    ]


_APART: dict[type, Callable[[Any], Parts]] = {
    tuple: lambda value: [TUPLE, *value],
    set: lambda value: [_SET, *value],
    frozenset: lambda value: [_FROZENSET, *value],
    OrderedDict: lambda value: [_ORDERED, dict(value)],
    int: _integer_parts,  # those of more than 64 bits
    complex: lambda value: [_COMPLEX, value.real, value.imag],
    type(...): lambda _: [_ELLIPSIS],
    range: lambda value: [_RANGE, value.start, value.stop, value.step],
    NotSent: lambda value: [_NOT_SENT, value.where],
    slice: lambda value: [_SLICE, value.start, value.stop, value.step],
    datetime.date: lambda value: [_DATE, value.toordinal()],
    datetime.datetime: _moment_parts,
    datetime.timedelta: lambda value: [
        _DURATION,
        value.days,
        value.seconds,
        value.microseconds,
    ],
}
