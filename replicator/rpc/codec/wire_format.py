"""Constants of the wire format: msgpack extensions, and the places of buffers."""

from collections.abc import Sequence

from replicator.errors import MessageTooLargeError

TAG = 0
"""Begins a list of another type, which the next byte names. See `tagged_values`."""
ARRAY = 1
"""A header; the elements are the next buffer, if there are any."""
SHORT_ARRAY = 2
"""The elements, which come first because there Python aligns them, then a header."""
SCALAR = 3
"""A NumPy scalar, likewise."""
BYTES = 4
"""A length in 8 bytes, little-endian; the bytes are the next buffer."""

NONE = b"\xc0"
"""The head of None, as msgpack has it."""

SINGLE_ARRAY = 0xC1
"""Begins a head that is not msgpack, nor ever is; see `single_array_messages`."""
NO_ARGUMENTS = bytes([SINGLE_ARRAY, 0xFF])
"""Begins the head of a call without arguments; see `no_argument_calls`."""

SURROGATES = "surrogatepass"
"""How strings are encoded: Python's may hold halves of pairs."""

ALIGNMENT = 64
"""Buffers that lie in one piece of memory start at multiples of this."""


def aligned(end: int) -> int:
    """Return where the next buffer starts after one that ends at `end`."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def lay_out(buffers: Sequence[memoryview]) -> tuple[list[int], int]:
    """Place buffers in one piece of memory, aligned.

    Returns:
      The offset of each, and the size of the whole.

    >>> lay_out([memoryview(bytes(70)), memoryview(bytes(8))])
    ([0, 128], 136)
    """
    offsets, end = [], 0
    for buffer in buffers:
        start = aligned(end)
        offsets.append(start)
        end = start + len(buffer)
    return offsets, end


def in_one_piece(buffers: Sequence[memoryview]) -> memoryview:
    """Return a read-only copy of the buffers, laid out.

    >>> len(in_one_piece([memoryview(b"abc"), memoryview(b"d")]))
    65
    """
    offsets, size = lay_out(buffers)
    body = bytearray(size)
    for offset, buffer in zip(offsets, buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return memoryview(body).toreadonly()


def too_large(what: str, number: int, limit: str, most: int) -> MessageTooLargeError:
    """Return the error for a message that exceeds one of `MessageLimits`."""
    return MessageTooLargeError(
        f"A message must have at most {most} {what} (`MessageLimits.{limit}`), got "
        f"{number}. Send less at once, or raise the limit at both ends."
    )
