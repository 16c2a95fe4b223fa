"""Transfer trees of pieces between two processes, over `rpc`: offer, choice, bytes.

A piece is a region of one leaf: a name, a place, a shape, a dtype and a checksum. The
giver offers trees of them by name; the taker reads the offer, chooses, and reads the
bytes in parts of at most `PART_BYTES`, which is what either end holds beside the pieces
themselves. Nothing is used before its checksum has confirmed it.

What arrives is data: numbers, names, dtypes of a list (`rpc.codec.array_headers`).
Connections are those of `rpc`: a Unix socket, or gRPC, with TLS beyond this host; both
ends prove the secret of the run, and a cut connection is made again within the
deadline, which bounds the whole transfer.
"""

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np

from replicator.base.accepts import accepts, items, text
from replicator.base.host.strict_json import strict_json
from replicator.distributed.agreement import Json
from replicator.errors import (
    ArgumentError,
    CallTimeoutError,
    DecodeError,
    EncodeError,
    MessageTooLargeError,
)
from replicator.rpc.client.client import Client
from replicator.rpc.codec.array_headers import check_contents, describe, described
from replicator.rpc.server.methods import idempotent
from replicator.rpc.server.server import Server

PART_BYTES = 1 << 26
"""Most bytes of one answer."""

_MOST_RANK = 32
_MOST_PARTS = 1 << 15
_OFFER, _READ = "offer_pieces", "read_pieces"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A region of one leaf.

    Attributes:
      name: Name of the leaf; any text.
      start: Start of the region on each axis of the leaf.
      shape: Shape of the region.
      dtype: Dtype, as `rpc.codec.array_headers.describe` writes it.
      crc32: Checksum of the fields above, and of its bytes, in C order.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    crc32: int

    @classmethod
    def of(cls, name: str, array: np.ndarray, start: Sequence[int] = ()) -> Self:
        """Describe an array that is a piece of a leaf, by default the whole leaf.

        >>> Piece.of("w", np.zeros(2, np.float32))
        Piece(name='w', start=(0,), shape=(2,), dtype='<f4', crc32=...)

        Raises:
          ArgumentError: Its dtype cannot be sent.
        """
        try:
            dtype = describe(array.dtype)
        except EncodeError as error:
            raise ArgumentError(
                f"`{name}` must have a dtype that can be sent, got {error}."
            ) from None
        start = tuple(start) or (0,) * array.ndim
        piece = cls(name=name, start=start, shape=array.shape, dtype=dtype, crc32=0)
        return dataclasses.replace(piece, crc32=piece._checksum(as_bytes(array)))

    @property
    def num_bytes(self) -> int:
        """Number of its bytes."""
        return math.prod(self.shape) * described(self.dtype).itemsize

    def array(self, data: Any) -> np.ndarray:
        """Return its bytes as an array, without a copy.

        Raises:
          DecodeError: They are not those of its checksum, or no values of its dtype.
        """
        if len(data) != self.num_bytes or self._checksum(data) != self.crc32:
            raise DecodeError(
                f"The piece of `{self.name}` at {list(self.start)} must be what was "
                "offered, got other bytes. Take it from elsewhere."
            )
        array = np.ndarray(self.shape, described(self.dtype), data)
        check_contents(array)
        return array

    def _checksum(self, data: Any) -> int:
        place = [self.name, self.start, self.shape, self.dtype]
        return zlib.crc32(data, zlib.crc32(strict_json(place).encode()))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PieceTree:
    """Description of a tree of pieces.

    Attributes:
      about: Values of the giver, of JSON's types.
      pieces: The pieces.
    """

    about: Any
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all pieces."""
        return sum(piece.num_bytes for piece in self.pieces)

    def as_json(self) -> dict[str, Json]:
        """Return it as plain values."""
        pieces = [[getattr(piece, name) for name in _FIELDS] for piece in self.pieces]
        return {"about": self.about, "pieces": pieces}

    @classmethod
    def from_json(cls, tree: Any) -> Self:
        """Read what `as_json` returned.

        Raises:
          DecodeError: It is something else.
        """
        try:
            return cls(about=tree["about"], pieces=tuple(map(_piece, tree["pieces"])))
        except (TypeError, KeyError, ValueError) as error:
            raise DecodeError(
                f"An offer must be a tree of pieces, got something else ({error})."
            ) from None


Offered = tuple[PieceTree, Callable[[int], Any]]
"""A tree, and the function that returns the bytes of a piece by its number."""


def offer_pieces(server: Server, find: Callable[[str], Offered | None]) -> Server:
    """Have a server, which is not started yet, offer trees of pieces.

    Args:
      server: Server of the giver; it may have other methods.
      find: Returns the tree of a name, None if there is none; called in any thread.

    Returns:
      The server.
    """
    giver = _Giver(find)
    return server.bind(_OFFER, giver.offer_pieces).bind(_READ, giver.read_pieces)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_part(value: Any) -> bool:
    return (
        type(value) in (list, tuple) and len(value) == 3 and all(map(_is_size, value))
    )


class _Giver:
    def __init__(self, find: Callable[[str], Offered | None]) -> None:
        self._find = find

    @idempotent
    @accepts(name=text())
    def offer_pieces(self, name: str) -> dict[str, Json] | None:
        found = self._find(name)
        return None if found is None else found[0].as_json()

    @idempotent
    @accepts(name=text(), parts=items("parts of pieces", _is_part, _MOST_PARTS))
    def read_pieces(
        self, name: str, parts: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        found = self._find(name)
        if found is None:  # it was offered a moment ago
            raise LookupError(f"`{name}` is not offered any more")
        return [
            np.frombuffer(memoryview(found[1](number))[begin:end], np.uint8)
            for number, begin, end in parts
        ]


def take_pieces(
    giver: Client,
    name: str,
    choose: Callable[[PieceTree], Iterable[int]] | None = None,
    *,
    most_bytes: int,
    timeout_s: float,
) -> tuple[PieceTree, dict[int, np.ndarray]]:
    """Take pieces of a tree that another process offers.

    Args:
      giver: Client of the server that offers it.
      name: Name of the tree.
      choose: Returns the numbers of the pieces that are wanted; by default all.
      most_bytes: Most bytes of these together.
      timeout_s: Longest time of all of it, in seconds.

    Returns:
      The tree, and the pieces by number; their checksums are verified.

    Raises:
      ArgumentError: No tree of that name is offered.
      MessageTooLargeError: The wanted pieces are larger; none was read.
      DecodeError: It is not an offer, or a piece is not what its checksum says.
      AuthenticationError: The giver has another secret.
      CallTimeoutError: It took longer, or nobody is there.
      RemoteError: The giver failed, or offers the tree no longer.
    """
    until_s = time.monotonic() + timeout_s
    tree = read_offer(giver, name, timeout_s=timeout_s)
    wanted = list(range(len(tree.pieces)) if choose is None else choose(tree))
    total = sum(tree.pieces[number].num_bytes for number in wanted)
    if total > most_bytes:
        raise MessageTooLargeError(
            f"The pieces taken of `{name}` must have at most {most_bytes} bytes, got "
            f"{total}. Take fewer at once."
        )
    left_s = until_s - time.monotonic()
    return tree, read_pieces(giver, name, tree, wanted, timeout_s=left_s)


def read_offer(giver: Client, name: str, *, timeout_s: float) -> PieceTree:
    """Return the description of a tree; arguments and errors as of `take_pieces`."""
    found = giver.call(_OFFER, [name], timeout_s=timeout_s)
    if found is None:
        raise ArgumentError(
            f"`name` must be a tree that {giver.address} offers, got {name!r}. Ask "
            "for another."
        )
    return PieceTree.from_json(found)


def read_pieces(
    giver: Client,
    name: str,
    tree: PieceTree,
    wanted: Iterable[int],
    *,
    timeout_s: float,
) -> dict[int, np.ndarray]:
    """Return pieces of a tree by number; arguments and errors as of `take_pieces`."""
    until_s = time.monotonic() + timeout_s
    rooms = {number: bytearray(tree.pieces[number].num_bytes) for number in wanted}
    for parts in _parts({number: len(room) for number, room in rooms.items()}):
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise CallTimeoutError(
                f"`{name}` of {giver.address} must arrive within {timeout_s:g} s, but "
                "did not. See why it is slow, or allow more."
            )
        answers = giver.call(_READ, [name, parts], timeout_s=left_s)
        try:
            for (number, begin, end), part in zip(parts, answers, strict=True):
                memoryview(rooms[number])[begin:end] = part
        except (TypeError, ValueError) as error:
            raise DecodeError(
                f"{giver.address} must send what was asked of `{name}`, got something "
                f"else ({error})."
            ) from None
    return {number: tree.pieces[number].array(room) for number, room in rooms.items()}


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array, in C order; a view where they lie like that.

    >>> len(as_bytes(np.zeros(2, np.float32)))
    8
    """
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


_FIELDS = tuple(field.name for field in dataclasses.fields(Piece))


def _parts(sizes: dict[int, int]) -> Iterator[list[tuple[int, int, int]]]:
    """Cut pieces into (number, begin, end), some of `PART_BYTES` together at a time."""
    parts, room = [], PART_BYTES
    for number, size in sizes.items():
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            parts.append((number, begin, end))
            room -= end - begin
            begin = end
            if not room or len(parts) == _MOST_PARTS:
                yield parts
                parts, room = [], PART_BYTES
    if parts:
        yield parts


def _piece(fields: Any) -> Piece:
    name, start, shape, dtype, crc32 = fields
    described(dtype)
    is_right = (
        isinstance(name, str)
        and len(start) == len(shape) <= _MOST_RANK
        and all(map(_is_size, (*start, *shape, crc32)))
    )
    if not is_right:
        raise ValueError(f"the piece {str(fields)[:80]}")
    return Piece(
        name=name, start=tuple(start), shape=tuple(shape), dtype=dtype, crc32=crc32
    )
