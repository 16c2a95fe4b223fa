"""Description of an array in a head: dtype, order and shape, from an allow-list.

    header   msgpack `[dtype, order, *shape]`
    dtype    "<f4", ">M8[25s]", "|S3"     what `_PLAIN` matches
             "bfloat16", "~bfloat16"      a name in `ml_dtypes`; `~`: bytes are swapped
             [size, [name, title, offset, dtype, *shape], ...]     fields

NumPy is handed a string only if the pattern matches the whole of it, so nothing in one
is ever evaluated. Dtypes with Python objects have no spelling here.
"""

import functools
import math
import re
import reprlib
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from msgpack import packb, unpackb

from replicator.errors import DecodeError, EncodeError
from replicator.rpc.codec.head_bounds import check_bounds
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.wire_format import SURROGATES

_PLAIN = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f(2|4|8|12|16)|[<>]c(8|16|24|32)"
    r"|[<>]U[0-9]{1,9}|\|[SV][0-9]{1,9}"
    r"|[<>][mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_EXTENDED = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_FIRST_USER_DEFINED = 256  # `dtype.num` of what is not NumPy's own
_MAX_NUM_BYTES = 2**63 - 1
_MAX_EMPTY = 2**16  # elements that take no bytes; copies of NumPy's may take some
_MAX_CODE_POINT = 0x10FFFF
# Of the description of one dtype: fields may lie within fields.
_DESCRIPTION = MessageLimits(depth=16, leaves=65_536)
_MAX_HEADER_BYTES = 65_536

_LONG_HEADER = 256  # its length does not fit into a byte

Order = Literal["C", "F"]


class ArrayHeader(NamedTuple):
    """A decoded header.

    Attributes:
      shape: Shape of the array.
      dtype: Dtype of the array.
      order: Memory order of the elements.
      num_bytes: Number of bytes of the elements.
      is_checked: Whether some bytes are not a valid value of this dtype.
      is_copied: Whether it holds more than floats, so that no other process may write
        to it while it is used.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    order: Order
    num_bytes: int
    is_checked: bool
    is_copied: bool


@functools.lru_cache(maxsize=4096)  # programs send the same shapes again and again
def write_header(dtype: np.dtype, shape: tuple[int, ...], is_fortran: bool) -> bytes:
    """Describe an array.

    Returns:
      The header, whose last byte is the number of bytes before it; 0: more than fit
      into a byte.

    Raises:
      EncodeError: The dtype cannot be sent.

    >>> header = write_header(np.dtype("float32"), (2, 3), False)
    >>> read_header(header).shape, read_header(header).num_bytes
    ((2, 3), 24)
    """
    contents = [describe(dtype), int(is_fortran), *shape]
    header = packb(contents, unicode_errors=SURROGATES)
    assert header is not None  # the packer is one that returns what it packed
    if len(header) > _MAX_HEADER_BYTES:
        raise EncodeError("an array of too many fields. Send it in parts")
    return header + bytes([len(header) if len(header) < _LONG_HEADER else 0])


def read_header(header: bytes) -> ArrayHeader:
    """Decode and check a header of `write_header`.

    Raises:
      DecodeError: It does not describe an array.
    """
    return _parsed_once(header) if len(header) <= _LONG_HEADER else _parsed(header)


def describe(dtype: np.dtype) -> str | list:
    """Write a dtype; `described` reads it.

    Raises:
      EncodeError: It cannot be sent.

    >>> describe(np.dtype("float32")), describe(np.dtype("bfloat16"))
    ('<f4', 'bfloat16')
    """
    if dtype.hasobject:
        raise EncodeError(
            f"an array of Python objects (dtype {dtype}). Send a list, or an array of "
            "numbers"
        )
    if dtype.num >= _FIRST_USER_DEFINED:
        if dtype.type is not _EXTENDED.get(dtype.name, dtype).type:
            raise EncodeError(f"an array of dtype {dtype}. Send it as another dtype")
        return dtype.name if dtype == _EXTENDED[dtype.name] else f"~{dtype.name}"
    if dtype.names is not None:
        return [dtype.itemsize, *(_describe_field(dtype, n) for n in dtype.names)]
    if not _PLAIN.fullmatch(dtype.str):
        raise EncodeError(f"an array of dtype {dtype}. Send it as another dtype")
    return dtype.str


def described(description: Any) -> np.dtype:
    """Return the dtype that `describe` wrote.

    Raises:
      DecodeError: It is not a dtype that may arrive.

    >>> described("<f4")
    dtype('float32')
    >>> described("O")
    Traceback (most recent call last):
    ...
    replicator.errors.DecodeError: A dtype must be one that can be sent, got 'O'.
    """
    if type(description) is str:
        name = description.removeprefix("~")
        if name in _EXTENDED:
            dtype = _EXTENDED[name]
            return dtype if name == description else dtype.newbyteorder("S")
        if _PLAIN.fullmatch(description):
            return np.dtype(description)
    elif type(description) is list and description:
        return _described_fields(*description)
    raise DecodeError(
        f"A dtype must be one that can be sent, got {reprlib.repr(description)}."
    )


def check_contents(array: np.ndarray) -> None:
    """Refuse truth values that are neither 0 nor 1, and text that is not text.

    NumPy and Python trust such memory, and would read or write out of bounds.

    Raises:
      DecodeError: The array holds some.

    >>> check_contents(np.array([0, 2], np.uint8).view(np.bool_))
    Traceback (most recent call last):
    ...
    replicator.errors.DecodeError: An array of truth values must hold zeros and ones.
    """
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            check_contents(array[name])
    elif array.size == 0 or dtype.itemsize == 0:
        return
    elif dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise DecodeError("An array of truth values must hold zeros and ones.")
    elif dtype.kind == "U":
        code_points = array.ravel("K").view(
            np.dtype(np.uint32).newbyteorder(dtype.byteorder)
        )
        if code_points.max() > _MAX_CODE_POINT:
            raise DecodeError("An array of text must hold code points.")


def _describe_field(dtype: np.dtype, name: str) -> list:
    fields: Any = dtype.fields
    field, offset, *titles = fields[name]
    title = titles[0] if titles else None
    if not (title is None or type(title) is str):
        raise EncodeError(f"an array with the title {title!r}. Let titles be strings")
    base, shape = field.subdtype or (field, ())
    return [name, title, offset, describe(base), *shape]


def _parsed(header: bytes) -> ArrayHeader:
    header = header[:-1]
    if len(header) > _MAX_HEADER_BYTES:
        raise DecodeError("An array's description is too long.")
    check_bounds(header, _DESCRIPTION)
    description, order, *shape = unpackb(header, unicode_errors=SURROGATES)
    dtype = described(description)
    if order not in (0, 1) or not all(map(_is_size, shape)):
        raise DecodeError(f"A shape must be of sizes, got {reprlib.repr(shape)}.")
    # Python's integers do not overflow; NumPy multiplies all sizes but zeros.
    count = math.prod(size for size in shape if size)
    num_bytes = count * dtype.itemsize
    if num_bytes > _MAX_NUM_BYTES or (num_bytes == 0 and count > _MAX_EMPTY):
        raise DecodeError(
            f"An array must fit into memory, got shape {reprlib.repr(shape)}."
        )
    if 0 in shape:
        num_bytes = 0
    order = "F" if order else "C"
    kinds = _kinds(dtype)
    is_checked, is_copied = bool(kinds & {"b", "U"}), not kinds <= {"f", "c"}
    return ArrayHeader(tuple(shape), dtype, order, num_bytes, is_checked, is_copied)


def _is_size(size: Any) -> bool:
    return type(size) is int and size >= 0


def _described_fields(size: Any, *fields: Any) -> np.dtype:
    names, titles, offsets, formats = [], [], [], []
    for name, title, offset, description, *shape in fields:
        is_named = type(name) is str and (title is None or type(title) is str)
        if not (is_named and _is_size(offset) and all(map(_is_size, shape))):
            raise DecodeError(
                f"A field must be a name at an offset, got {reprlib.repr(name)}."
            )
        names.append(name)
        titles.append(title)
        offsets.append(offset)
        base = described(description)
        formats.append(np.dtype((base, tuple(shape))) if shape else base)
    if not _is_size(size):
        raise DecodeError(f"A dtype must have a size, got {reprlib.repr(size)}.")
    spec: Any = {"names": names, "formats": formats, "offsets": offsets}
    spec |= {"itemsize": size, "titles": titles}
    return np.dtype(spec)


def _kinds(dtype: np.dtype) -> set[str]:
    """Return the kinds of all that a dtype holds."""
    if dtype.subdtype is not None:
        return _kinds(dtype.subdtype[0])
    if dtype.names is not None:
        return set().union(*(_kinds(dtype[n]) for n in range(len(dtype.names))))
    if dtype.num >= _FIRST_USER_DEFINED:
        return {"i" if "int" in dtype.name else "f"}
    return {dtype.kind}


_parsed_once = functools.lru_cache(maxsize=4096)(_parsed)
