"""Messages without msgpack: a value that is an array, a call whose one argument is.

Programs push arrays, and msgpack takes as long as all the rest of a small one:

    head   SINGLE_ARRAY, the length of `call`, `call`, a code, data
    call   nothing: the value is the array; or msgpack `[method, timeout_s]`: the value
           is `[method, [array], None, timeout_s]`
    code   ARRAY or SHORT_ARRAY, with the data that it has as an extension

Calls come again and again, so `call` is packed and unpacked once.
"""

import functools
from typing import Any

import numpy as np

from replicator.base.types import PyTree
from replicator.errors import DecodeError
from replicator.rpc.codec.array_headers import read_header, write_header
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.no_argument_calls import (
    REMEMBERED,
    TIMES,
    pack_call,
    unpack_call,
)
from replicator.rpc.codec.value_reader import Body, array_of, bytes_of, short_header
from replicator.rpc.codec.value_writer import LONG_BYTES
from replicator.rpc.codec.wire_format import ARRAY, SHORT_ARRAY, SINGLE_ARRAY, too_large

_ALONE = bytes([SINGLE_ARRAY, 0])
_ARRAY, _SHORT_ARRAY = bytes([ARRAY]), bytes([SHORT_ARRAY])
_CALL_ITEMS = 4
_CALL_DEPTH = 2

_ndarray = np.ndarray
_uint8 = np.uint8


def encode_single_array(
    value: PyTree, limits: MessageLimits
) -> tuple[bytes, list[memoryview], int] | None:
    """Return head, buffers and the bytes of both; None: leave the value to msgpack.

    Raises:
      EncodeError: The array's dtype cannot be sent.
    """
    if type(value) is _ndarray:
        return _written(_ALONE, value, limits)
    if type(value) is not list or len(value) != _CALL_ITEMS:
        return None
    method, args, kwargs, timeout_s = value
    if kwargs is not None or type(method) is not str or type(timeout_s) not in TIMES:
        return None
    if type(args) is list and len(args) == 1 and type(args[0]) is _ndarray:
        start = _start_of_call(method, timeout_s)
        if start and limits.depth >= _CALL_DEPTH:
            return _written(start, args[0], limits)
    return None


def decode_single_array(
    head: bytes | memoryview, body: Body, limits: MessageLimits
) -> PyTree:
    """Return the value that `encode_single_array` encoded.

    Raises:
      Exception: The head is not of that kind; of any type.
    """
    at = 2 + head[1]
    code = head[at]
    # A copy: there the elements are aligned.
    array = _read(code, bytes(head[at + 1 :]), body, limits)
    if at == len(_ALONE):
        return array
    if limits.depth < _CALL_DEPTH:
        raise too_large("containers in a call", _CALL_DEPTH, "depth", limits.depth)
    method, timeout_s = _read_call(bytes(head[2:at]))
    return [method, [array], None, timeout_s]


def _written(
    start: bytes, array: np.ndarray, limits: MessageLimits
) -> tuple[bytes, list[memoryview], int] | None:
    """Write an array; None if it needs more care: a copy, or an error with its name."""
    shape, num_bytes = array.shape, array.nbytes
    is_fit = len(shape) <= limits.rank and limits.leaves > 0
    if not (is_fit and array.flags.c_contiguous):
        return None
    header = write_header(array.dtype, shape, False)
    buffers: list[memoryview] = []
    if num_bytes >= LONG_BYTES:
        head = start + _ARRAY + header
        view: Any = _ndarray((num_bytes,), _uint8, array)
        buffers.append(memoryview(view))
        num_bytes += len(head)
    elif header[-1]:
        head = start + _SHORT_ARRAY + array.tobytes() + header
        num_bytes = len(head)
    else:
        return None
    if num_bytes > limits.message_bytes or len(head) > limits.head_bytes:
        return None
    return head, buffers, num_bytes


def _read(code: int, data: bytes, body: Any, limits: MessageLimits) -> np.ndarray:
    if code == SHORT_ARRAY:
        header, buffer = short_header(data), data
        num_bytes = 0
    elif code == ARRAY:
        header = read_header(data)
        num_bytes = header.num_bytes
        if num_bytes > limits.message_bytes:
            most = limits.message_bytes
            raise too_large("bytes", num_bytes, "message_bytes", most)
        buffer = bytes_of(body) if num_bytes else b""
    else:
        raise DecodeError(f"A single array must be an array, got code {code}.")
    if limits.leaves < 1:
        raise too_large("arrays", 1, "leaves", limits.leaves)
    if len(body) != num_bytes:
        raise DecodeError("A body must hold what the head names and no more.")
    return array_of(header, buffer, 0, limits, type(body) is _ndarray)


@functools.lru_cache(maxsize=REMEMBERED, typed=True)
def _start_of_call(method: str, timeout_s: float | None) -> bytes:
    """Return the start of a call's head; nothing: leave it to msgpack."""
    call = pack_call(method, timeout_s)
    return bytes([SINGLE_ARRAY, len(call)]) + call if call else b""


_read_call = functools.lru_cache(maxsize=REMEMBERED)(unpack_call)
