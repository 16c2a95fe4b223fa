"""State of an environment or an actor as bytes, which a table keeps and returns.

They are sent, and stored in checkpoints, so they are read by the codec of `rpc`, which
accepts data and arrays only, no code.

    8 bytes   length of the head, little-endian
    head      as `codec.encode` returns it
    body      the bytes of arrays, aligned
"""

from replicator.base.types import PyTree
from replicator.errors import DecodeError
from replicator.rpc.codec.codec import decode, encode
from replicator.rpc.codec.wire_format import in_one_piece

_LENGTH_BYTES = 8


def pack(value: PyTree) -> bytes:
    """Return a value as bytes; equal bytes for equal values.

    Args:
      value: Plain data and arrays, as `rpc` sends them.

    Raises:
      EncodeError: A part of it is neither; names the part.

    >>> unpack(pack({"steps": 3}))
    {'steps': 3}
    """
    head, buffers, _ = encode(value)
    length = len(head).to_bytes(_LENGTH_BYTES, "little")
    return b"".join((length, head, in_one_piece(buffers)))


def unpack(packed: bytes) -> PyTree:
    """Return the value that `pack` turned into these bytes; its arrays are read-only.

    Raises:
      DecodeError: They are not bytes of `pack`.

    >>> unpack(pack((3, b"ab")))
    (3, b'ab')
    """
    end = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
    if len(packed) < end:
        raise DecodeError(f"A snapshot is cut off: {len(packed)} of {end} bytes.")
    return decode(packed[_LENGTH_BYTES:end], packed[end:])
