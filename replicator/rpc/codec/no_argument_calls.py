"""Calls without arguments: they come again and again, so each is packed once.

    head   NO_ARGUMENTS, msgpack `[method, timeout_s]`

Unpacked calls are kept as well. Both caches are bounded, in calls and in the bytes of
each. (Packed by msgpack each time, a call without arguments takes a third longer.)
"""

import functools
from typing import Any, Final, NamedTuple

from msgpack import packb, unpackb

from replicator.errors import DecodeError
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.wire_format import NO_ARGUMENTS, SURROGATES, too_large

REMEMBERED: Final = 256
"""Calls of one kind that are not packed, or unpacked, again. Few: a call that is tried
again has a deadline that never comes back."""
_MOST_BYTES = 252
_DEPTH = 1  # it counts as the list that it stands for
_LONGEST_S = 2**31
TIMES = (float, int, type(None))
"""Types of a deadline; bool, though a subclass of int, is not one."""


class NoArgumentCall(NamedTuple):
    """The value of a call message without arguments; others are lists of the same.

    It arrives as it is, or as a list if the method's name is long.
    """

    method: str
    args: None
    kwargs: None
    timeout_s: float | None


def pack_call(method: str, timeout_s: float | None) -> bytes:
    """Return method and deadline as msgpack; nothing: leave them to the codec.

    >>> unpack_call(pack_call("add", 60.0))
    ('add', 60.0)
    >>> pack_call("add", -1.0)
    b''
    """
    if not _is_plain(method, timeout_s):
        return b""
    call = packb([method, timeout_s], unicode_errors=SURROGATES)
    assert call is not None  # the packer is one that returns what it packed
    return call if len(call) <= _MOST_BYTES else b""


def unpack_call(call: bytes) -> tuple[str, float | None]:
    """Return the arguments of `pack_call`.

    Raises:
      Exception: The bytes are not such a call; of any type.
    """
    if len(call) > _MOST_BYTES:
        raise DecodeError(f"Method and time must have at most {_MOST_BYTES} bytes.")
    method, timeout_s = unpackb(call, unicode_errors=SURROGATES)
    if not _is_plain(method, timeout_s):
        raise DecodeError("A call must be of a method, with a timeout.")
    return method, timeout_s


def _is_plain(method: Any, timeout_s: Any) -> bool:
    if type(method) is not str or type(timeout_s) not in TIMES:
        return False
    # Zeros of both signs are equal, and would be taken for each other.
    return timeout_s is None or 0 < timeout_s < _LONGEST_S


@functools.lru_cache(maxsize=REMEMBERED, typed=True)
def encode_no_argument_call(
    method: str, args: None, kwargs: None, timeout_s: float | None
) -> bytes:
    """Return the head of a call without arguments; nothing: leave it to msgpack."""
    call = pack_call(method, timeout_s)
    return NO_ARGUMENTS + call if call else b""


def decode_no_argument_call(
    head: bytes | memoryview, body: Any, limits: MessageLimits
) -> NoArgumentCall:
    """Return the call that `encode_no_argument_call` encoded.

    Raises:
      Exception: The head is not such a call; of any type.
    """
    if len(body):
        raise DecodeError("A body must hold what the head names and no more.")
    if limits.depth < _DEPTH:
        raise too_large("containers in a call", _DEPTH, "depth", limits.depth)
    return _read(bytes(head))


@functools.lru_cache(maxsize=REMEMBERED)
def _read(head: bytes) -> NoArgumentCall:
    method, timeout_s = unpack_call(head[len(NO_ARGUMENTS) :])
    return NoArgumentCall(method, None, None, timeout_s)
