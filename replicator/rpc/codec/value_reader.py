"""Read one value: what msgpack's lists, dictionaries and extensions stand for.

All of it came over the wire. What is wrong raises, some of it as whatever error Python
or NumPy have for it, which `decode` turns into one. (msgpack's own `Timestamp` needs no
help, and passes as it was.)
"""

from typing import Any, TypeAlias

import numpy as np

from replicator.errors import DecodeError
from replicator.rpc.codec.array_headers import ArrayHeader, check_contents, read_header
from replicator.rpc.codec.head_bounds import check_hashes
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.receive_memory import receive_memory
from replicator.rpc.codec.registry import Registry
from replicator.rpc.codec.tagged_values import TAGS, TUPLE_TAG, Tag
from replicator.rpc.codec.wire_format import (
    ALIGNMENT,
    ARRAY,
    BYTES,
    SCALAR,
    SHORT_ARRAY,
    TAG,
    too_large,
)

_FEW_KEYS = 64  # cannot be slow, whatever they are

Body: TypeAlias = bytes | memoryview | np.ndarray
"""What holds the buffers where `lay_out` puts them; an array is of bytes, read-only, in
shared memory: its sender may write to it."""

_ndarray = np.ndarray
_frombuffer = np.frombuffer
_uint8 = np.uint8


class ValueReader:
    """One value on its way out of a head and buffers."""

    in_head_bytes = 0
    _open_tags = 0
    _num_leaves = 0
    _num_bytes = 0
    _at = 0  # in the body
    _whole: np.ndarray | None = None

    def __init__(self, body: Body, registry: Registry, limits: MessageLimits) -> None:
        self._is_shared = type(body) is _ndarray
        self._body = body
        self._registry = registry
        self._limits = limits

    def read_extension(self, code: int, data: bytes) -> Any:
        """Return what an extension stands for."""
        if code == TAG:
            self._open_tags += 1
            if data not in TAGS:
                raise DecodeError(f"A tag must be a known one, got {data!r:.80}.")
            return TAGS[data]
        if code == SHORT_ARRAY:
            self._num_leaves += 1
            return self._short_array(data)
        if code == ARRAY:
            self._num_leaves += 1
            header = read_header(data)
            if not header.num_bytes:
                return self._array(header, b"", 0)
            return self._array(header, *self._take(header.num_bytes))
        if code == SCALAR:
            return self._short_array(data)[()]
        if code == BYTES:
            self._num_leaves += 1
            num_bytes = int.from_bytes(data, "little")
            buffer, start = self._take(num_bytes)
            return buffer[start : start + num_bytes].tobytes()
        raise DecodeError(f"An extension must be a known one, got code {code}.")

    def read_list(self, items: list) -> Any:
        """Return what a list stands for: itself, or what its tag makes of it."""
        if not items or type(items[0]) is not Tag:
            return items
        self._open_tags -= 1
        tag = items.pop(0)
        return tuple(items) if tag is TUPLE_TAG else tag.build(items, self._registry)

    def finish(self) -> None:
        """Refuse tags that began no list, and buffers that nothing named."""
        if self._open_tags:
            raise DecodeError("A tag must be the first item of a list.")
        if self._at != len(self._body):
            raise DecodeError("A body must hold what the head names and no more.")

    def _short_array(self, data: bytes) -> np.ndarray:
        self.in_head_bytes += len(data)
        return self._array(short_header(data), data, 0)

    def _array(self, header: ArrayHeader, buffer: Any, start: int) -> np.ndarray:
        if self._num_leaves > self._limits.leaves:
            most = self._limits.leaves
            raise too_large("arrays", self._num_leaves, "leaves", most)
        return array_of(header, buffer, start, self._limits, self._is_shared)

    def _take(self, num_bytes: int) -> tuple[np.ndarray, int]:
        """Return what the next buffer lies in, and where."""
        self._num_bytes += num_bytes
        most = self._limits.message_bytes
        if self._num_bytes > most:
            raise too_large("bytes", self._num_bytes, "message_bytes", most)
        start = -(-self._at // ALIGNMENT) * ALIGNMENT
        self._at = start + num_bytes
        if self._whole is None:
            self._whole = bytes_of(self._body)
        if self._at > len(self._whole):
            raise DecodeError("A body must hold what the head names.")
        return self._whole, start


def array_of(
    header: ArrayHeader, buffer: Any, start: int, limits: MessageLimits, is_shared: bool
) -> np.ndarray:
    """Return the array that a header describes, in the memory of a buffer.

    Or in memory of its own, if the sender can still write to the buffer, and could do
    more harm there than a wrong number.

    Raises:
      DecodeError: The bytes there are not valid for its dtype.
      MessageTooLargeError: It has too many dimensions.
    """
    shape, dtype, order, num_bytes, is_checked, is_copied = header
    if len(shape) > limits.rank:
        raise too_large("dimensions in an array", len(shape), "rank", limits.rank)
    is_shared &= type(buffer) is _ndarray and not limits.trusted_memory
    if is_shared and is_copied:
        # First of all: what is checked must be what is used.
        memory = receive_memory(num_bytes)
        np.copyto(_frombuffer(memory, _uint8), buffer[start : start + num_bytes])
        buffer, start = bytes_of(memory), 0
    array = _ndarray(shape, dtype, buffer, start, None, order)
    if is_checked:
        check_contents(array)
    return array


def short_header(data: bytes) -> ArrayHeader:
    """Return the header of a short array.

    Raises:
      DecodeError: It is invalid, or the array is not as long as in the header.
    """
    text = data[-1 - data[-1] :]
    header = read_header(text)
    if len(data) != len(text) + header.num_bytes:
        raise DecodeError("A short array must be as long as in its header.")
    return header


def bytes_of(buffer: memoryview | bytes | bytearray | np.ndarray) -> np.ndarray:
    """Return memory as an array of bytes that cannot be made writable."""
    if isinstance(buffer, np.ndarray):
        return buffer
    # `frombuffer` holds on to the view, so that its memory cannot be closed or resized,
    # nor made writable; `ndarray` would hold what owns the memory.
    return _frombuffer(memoryview(buffer).toreadonly(), _uint8)


def read_dict(pairs: list[tuple[Any, Any]]) -> dict:
    """Return a dictionary of keys that differ.

    >>> read_dict([("a", 1), ("b", 2)])
    {'a': 1, 'b': 2}
    >>> read_dict([("a", 1), ("a", 2)])
    Traceback (most recent call last):
    ...
    replicator.errors.DecodeError: A dictionary must have each key once.
    """
    if len(pairs) > _FEW_KEYS:
        check_hashes([key for key, _ in pairs])
    found = dict(pairs)
    if len(found) != len(pairs):
        raise DecodeError("A dictionary must have each key once.")
    return found
