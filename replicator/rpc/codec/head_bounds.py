"""Hold a head against its bounds before anything is built from it.

msgpack's unpacker makes a list as long as a head claims it to be, on each of 1,024
levels, before it sees that the items are missing. Its `skip` walks the same bytes and
builds nothing: a head that it finds whole claims no more items than it has bytes. It
takes 3 µs, so short heads, which can claim little, are not walked if they need not be.
"""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

from msgpack import OutOfData, StackError, Unpacker, unpackb

from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec.message_limits import MessageLimits

if Unpacker.__module__ == "msgpack.fallback":  # its stack is Python's, of any depth
    raise ImportError(
        "replicator.rpc needs msgpack as it is compiled, got the one in pure Python. "
        "Unset MSGPACK_PUREPYTHON, or install a wheel of msgpack for this platform."
    )

SHORT_HEAD_BYTES = 2048
"""Up to here a head need not be walked first: lists are announced in 3 bytes and may
claim as many items as the head has bytes, so 682 of them make 11 MB at most."""

CONTAINERS_PER_LEAF = 16
"""A byte makes an empty list of 56: there may be so many containers for each leaf that
the limits allow, a million by default."""

_SHARE_A_HASH = 64
_ONE_ITEM_LIST = b"\x91"
_MOST_STACK = 65_536
_STARTS_OF_CONTAINERS = {*range(0x80, 0xA0), *range(0xDC, 0xE0)}
_NO_STARTS = bytes(set(range(256)) - _STARTS_OF_CONTAINERS)


def check_bounds(
    head: bytes | memoryview, limits: MessageLimits, *, opaque_bytes: int = 0
) -> None:
    """Refuse a head that is not whole, too deep, or of too many containers.

    Args:
      head: One value as msgpack.
      limits: Limits of its depth and of its leaves.
      opaque_bytes: Number of its bytes that are known to hold no containers.

    Raises:
      DecodeError: It is not msgpack, or not one whole value.
      MessageTooLargeError: It exceeds a limit.

    >>> from msgpack import packb
    >>> check_bounds(packb([[[[[]]]]]), MessageLimits(depth=2))
    Traceback (most recent call last):
    ...
    replicator.errors.MessageTooLargeError: A value must be at most 2 containers deep
    (`MessageLimits.depth`). Flatten it, or raise the limit at both ends.
    """
    num_bytes = len(head)
    # Every level takes a byte at least, and starts with one of few.
    if num_bytes - opaque_bytes <= limits.depth:
        return
    if num_bytes <= SHORT_HEAD_BYTES and _most_containers(head) <= limits.depth:
        return
    _walk(head, limits.depth)
    most = CONTAINERS_PER_LEAF * limits.leaves
    if num_bytes > most and _most_containers(head) > most:
        _check_containers(head, most)


def check_hashes(keys: Sequence[Any]) -> None:
    """Refuse keys that were chosen to share a hash: a table of them is quadratic.

    Raises:
      DecodeError: Too many share one.

    >>> check_hashes([float(number) for number in range(1000)])
    >>> check_hashes([number * (2**61 - 1) for number in range(1000)])
    Traceback (most recent call last):
    ...
    replicator.errors.DecodeError: At most 64 keys of a dictionary or set may share a
    hash.
    """
    # The hashes of strings and bytes are secret, so they cannot be chosen.
    if len(keys) <= _SHARE_A_HASH or set(map(type, keys)) <= {str, bytes}:
        return
    hashes = sorted(map(hash, keys))
    if any(map(operator.eq, hashes, hashes[_SHARE_A_HASH:])):
        raise DecodeError(
            f"At most {_SHARE_A_HASH} keys of a dictionary or set may share a hash."
        )


def _most_containers(head: bytes | memoryview) -> int:
    return len(bytes(head).translate(None, _NO_STARTS))


def _walk(head: bytes | memoryview, depth: int) -> None:
    # Lists of one item around it leave as many levels of the unpacker's stack as the
    # limit allows.
    around = _ONE_ITEM_LIST * (_STACK_SIZE - depth)
    size = len(around) + len(head)
    unpacker = Unpacker(read_size=size, max_buffer_size=size)
    unpacker.feed(around)
    unpacker.feed(head)
    try:
        unpacker.skip()
    except StackError:
        raise MessageTooLargeError(
            f"A value must be at most {depth} containers deep (`MessageLimits.depth`). "
            "Flatten it, or raise the limit at both ends."
        ) from None
    except (OutOfData, ValueError) as error:
        raise DecodeError(
            f"A message's head is not whole: {type(error).__name__}."
        ) from None
    if unpacker.tell() != size:
        raise DecodeError("A message's head goes on after its value.")


def _check_containers(head: bytes | memoryview, most: int) -> None:
    """Count by unpacking; what is unpacked is dropped at once."""
    found = 0

    def count(_: list) -> None:
        nonlocal found
        found += 1
        if found > most:
            raise MessageTooLargeError(
                f"A value must have at most {most} containers ({CONTAINERS_PER_LEAF} "
                "times `MessageLimits.leaves`). Send arrays, or raise it at both ends."
            )

    unpackb(
        head,
        list_hook=count,
        object_pairs_hook=count,
        ext_hook=lambda code, data: None,
        strict_map_key=False,
        raw=True,
    )


def _stack_size() -> int:
    """Find how deep msgpack goes (1,024 in all its versions so far)."""
    unpacker = Unpacker()
    unpacker.feed(_ONE_ITEM_LIST * _MOST_STACK)
    with contextlib.suppress(StackError):
        unpacker.skip()
    return unpacker.tell()


_STACK_SIZE = _stack_size()
