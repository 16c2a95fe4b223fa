"""Write one value: replacements for the types that msgpack does not have.

Short arrays go into the head, where they cost least; longer ones become buffers. All
calls come through here: what can be known once is kept from call to call.
"""

import sys
from typing import Any

import numpy as np
from msgpack import ExtType, Packer

from replicator.errors import EncodeError
from replicator.rpc.codec import tagged_values
from replicator.rpc.codec.array_headers import write_header
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.registry import Registry
from replicator.rpc.codec.tagged_values import TUPLE
from replicator.rpc.codec.unsendable import why_not
from replicator.rpc.codec.wire_format import (
    ARRAY,
    BYTES,
    SCALAR,
    SHORT_ARRAY,
    SURROGATES,
    too_large,
)

LONG_BYTES = 4096
"""Arrays and bytes of so many are buffers."""
_MOST_IN_HEAD_BYTES = 1 << 18  # of short arrays; then they are buffers as well
_FEW_ITEMS = 16
_BYTES_LIKE = {bytes, bytearray, memoryview}
_NUMPY_TYPES = (np.str_, np.bytes_, np.dtype)
_HOLDS_NO_BYTES = {type(None), bool, int, float, str}

_ndarray = np.ndarray
_uint8 = np.uint8
_new_tuple = tuple.__new__  # `ExtType` checks its arguments, which takes 0.2 µs


def holds_long_bytes(value: Any) -> bool:
    """Return whether a value is long bytes, or a call or reply with some near the top.

    Those that lie deeper are found when the head turns out long.

    >>> holds_long_bytes([b"x" * 10_000]), holds_long_bytes({"a": b"x" * 10_000})
    (True, False)
    """
    kind = type(value)
    if kind is bytes:
        return len(value) >= LONG_BYTES
    if kind is list and len(value) <= _FEW_ITEMS:
        for item in value:
            kind = type(item)
            if kind is bytes:
                if len(item) >= LONG_BYTES:
                    return True
            elif kind is list or kind is dict:
                items = item if kind is list else item.values()
                if len(item) <= _FEW_ITEMS and any(map(_is_long_bytes, items)):
                    return True
    return False


def _is_long_bytes(value: Any) -> bool:
    return type(value) is bytes and len(value) >= LONG_BYTES


class _LongBytes:
    """Stands for long bytes until msgpack comes by: buffers are in its order."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data = data


class ValueWriter:
    """One value on its way into a head and buffers."""

    in_head_bytes = 0
    buffer_bytes = 0
    num_leaves = 0
    _searches = False
    _most_in_head_bytes = _MOST_IN_HEAD_BYTES

    def __init__(self, registry: Registry, limits: MessageLimits) -> None:
        self.buffers: list[memoryview] = []
        self._registry = registry
        self._limits = limits

    def pack(self, value: Any) -> bytes:
        """Return the head.

        Raises:
          Exception: Of any type; see `unsendable`.
        """
        # A packer of its own: a shared one would be entered again by other threads, and
        # by a `__del__` that sends.
        packer = Packer(
            default=self._replace,
            strict_types=True,
            unicode_errors=SURROGATES,
            buf_size=1024,
        )
        return packer.pack(value)

    def pack_apart(self, value: Any) -> bytes:
        """Return a head without the long bytes in lists and dictionaries."""
        self._searches = True
        # It may be for what else is in the head that it is past its limit.
        most = min(_MOST_IN_HEAD_BYTES, self._limits.head_bytes // 4)
        self._most_in_head_bytes = most
        return self.pack(self._searched(value))

    def _replace(self, value: Any) -> Any:
        """Return what is packed in place of a value."""
        kind = type(value)
        if kind is _ndarray:
            return self._array(value)
        if kind is _LongBytes:
            return self._long_bytes(value.data)
        parts = [TUPLE, *value] if kind is tuple else self._parts(value, kind)
        if type(parts) is ExtType:
            return parts
        for part in parts:
            if type(part) is bytes and len(part) >= LONG_BYTES:
                return [self._searched(part) for part in parts]
        return [self._searched(part) for part in parts] if self._searches else parts

    def _parts(self, value: Any, kind: type) -> Any:
        """Return the parts of a value, or the extension that it is."""
        parts = tagged_values.plain_parts(value)
        if parts is not None:
            return parts
        entry = self._registry.entry_of(kind)
        if entry is not None:
            return tagged_values.registered_parts(value, entry)
        if isinstance(value, _NUMPY_TYPES):
            return tagged_values.numpy_parts(value)
        if isinstance(value, np.generic):
            return self._scalar(value)
        if kind is np.memmap:
            return self._array(np.asarray(value))
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(value, jax.Array):
            return self._jax_array(value, jax)
        raise EncodeError(why_not(value))

    def _array(self, array: np.ndarray) -> ExtType:
        shape, num_bytes, flags = array.shape, array.nbytes, array.flags
        self.num_leaves += 1
        if len(shape) > self._limits.rank:
            raise too_large(
                "dimensions in an array", len(shape), "rank", self._limits.rank
            )
        is_fortran = not flags.c_contiguous and flags.f_contiguous
        header = write_header(array.dtype, shape, is_fortran)
        if not flags.forc:
            self._check_room(num_bytes)
            array = _in_one_piece(array)
        fits = self.in_head_bytes + num_bytes < self._most_in_head_bytes
        if fits and num_bytes < LONG_BYTES and header[-1]:
            data = array.tobytes("F" if is_fortran else "C") + header
            self.in_head_bytes += len(data)
            return _new_tuple(ExtType, (SHORT_ARRAY, data))
        if num_bytes:
            view: Any = _ndarray((num_bytes,), _uint8, array)
            self._add(memoryview(view))
        return _new_tuple(ExtType, (ARRAY, header))

    def _scalar(self, scalar: np.generic) -> ExtType:
        header = write_header(scalar.dtype, (), False)
        if not header[-1]:
            raise EncodeError("a scalar of too many fields. Send it as an array")
        data = scalar.tobytes() + header
        self.in_head_bytes += len(data)
        return _new_tuple(ExtType, (SCALAR, data))

    def _jax_array(self, array: Any, jax: Any) -> Any:
        if isinstance(array, jax.core.Tracer):
            raise EncodeError("a traced array. Send it outside of `jax.jit`")
        if not isinstance(array.dtype, np.dtype):
            return tagged_values.key_parts(array, jax)
        return self._array(np.asarray(array))  # no copy where its device is the CPU

    def _searched(self, value: Any) -> Any:
        """Return a value with the long bytes in lists and dictionaries set apart."""
        kind = type(value)
        if kind is list and not _HOLDS_NO_BYTES.issuperset(map(type, value)):
            return [self._searched(item) for item in value]
        if kind is dict:
            return {key: self._searched(item) for key, item in value.items()}
        if kind in _BYTES_LIKE and memoryview(value).nbytes >= LONG_BYTES:
            return _LongBytes(value)
        return value

    def _long_bytes(self, data: Any) -> ExtType:
        view = memoryview(data).cast("B")
        self.num_leaves += 1
        self._add(view)
        return ExtType(BYTES, len(view).to_bytes(8, "little"))

    def _check_room(self, num_bytes: int) -> None:
        """Refuse what is past the limit before it is copied."""
        total, most = self.buffer_bytes + num_bytes, self._limits.message_bytes
        if total > most:
            raise too_large("bytes", total, "message_bytes", most)

    def _add(self, buffer: memoryview) -> None:
        self.buffers.append(buffer)
        self.buffer_bytes += len(buffer)


def _in_one_piece(array: np.ndarray) -> np.ndarray:
    if array.dtype.names is None:
        return np.ascontiguousarray(array)
    # Zeros, because bytes between fields are not copied: they would reveal the former
    # contents of that memory.
    copy = np.zeros(array.shape, array.dtype)
    copy[...] = array
    return copy
