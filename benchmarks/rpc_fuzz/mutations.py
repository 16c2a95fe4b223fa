"""Messages that nobody should send: real ones with a few bytes changed, and inventions.

Pure: all of it follows from the seed.
"""

import random
import struct
from collections.abc import Sequence

from msgpack import packb

from replicator.rpc.codec import wire_format

# Starts of containers, long strings and extensions; lengths that lie.
_TELLING = bytes([0, 1, 0x7F, 0x80, 0x81, 0x90, 0x91, 0x9F, 0xA0, 0xC0, 0xC1, 0xC4])
_TELLING += bytes([0xC7, 0xC9, 0xD4, 0xD6, 0xD7, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF])
_LIES = (0, 1, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
_LETTERS = b"tsfoic.r:dmuOEFSBDK"
_DTYPES = ("<f4", "|b1", "<U2", "|S0", "|O8", "bfloat16", "<M8[s]", [1, ["a", None, 0]])
_MOST_CHANGES = 4


class Mutations:
    """A stream of messages that depends on the seed alone."""

    def __init__(self, seed: int, originals: Sequence[bytes]) -> None:
        """Start it.

        Args:
          seed: Of what is changed, and where.
          originals: Messages that are right.
        """
        self._rng = random.Random(seed)
        self._originals = originals

    def mutated(self, data: bytes) -> bytes:
        """Return `data` with some changes."""
        changed = bytearray(data)
        for _ in range(self._rng.randint(1, _MOST_CHANGES)):
            self._change(changed)
        return bytes(changed)

    def noise(self) -> bytes:
        """Return bytes at random; few are likelier than many."""
        return self._rng.randbytes(int(self._rng.random() ** 3 * 3000))

    def invented(self, depth: int = 5) -> bytes:
        """Return msgpack that might have been ours, were it not for its contents."""
        rng = self._rng
        choice = rng.random()
        if depth and choice < 0.35:
            return self._list(depth)
        if depth and choice < 0.45:
            count = rng.randrange(4)
            items = [self.invented(depth - 1) for _ in range(2 * count)]
            return bytes([0x80 | self._nearly(count)]) + b"".join(items)
        if choice < 0.6:
            return self._extension()
        if choice < 0.7:
            text = rng.choice((b"Point", b"Frozen", b"Color", b"a", b"x", b"\xff"))
            return bytes([0xA0 | self._nearly(len(text))]) + text
        if choice < 0.8:
            return rng.choice((b"\xca", b"\xcb", b"\xcf", b"\xd3")) + rng.randbytes(8)
        return bytes([rng.choice((0, 1, 2, 0x7F, 0xE0, 0xC0, 0xC2, 0xC3))])

    def _list(self, depth: int) -> bytes:
        items = [self.invented(depth - 1) for _ in range(self._rng.randrange(5))]
        if self._rng.random() < 0.7:
            letter = self._rng.choice(_LETTERS)
            items.insert(0, bytes([0xD4, wire_format.TAG, letter]))
        return bytes([0x90 | self._nearly(len(items))]) + b"".join(items)

    def _extension(self) -> bytes:
        rng = self._rng
        shape = [rng.choice((0, 1, 2, 3, 2**16, 2**31, 2**63)) for _ in range(2)]
        header = packb(
            [rng.choice(_DTYPES), rng.randrange(3), *shape[: rng.randrange(3)]]
        )
        assert header is not None  # the packer is one that returns what it packed
        data = rng.randbytes(rng.randrange(20)) + header + bytes([len(header)])
        code = rng.randrange(wire_format.BYTES + 2)
        if rng.random() < 0.2:
            return bytes([wire_format.SINGLE_ARRAY, code]) + data
        return bytes([0xC7, self._nearly(len(data), 255), code]) + data

    def _nearly(self, number: int, most: int = 15) -> int:
        """Return the number, or, seldom, one that it is not."""
        off = self._rng.choice((-1, 1, 5)) if self._rng.random() < 0.05 else 0
        return min(max(number + off, 0), most)

    def _change(self, data: bytearray) -> None:
        rng = self._rng
        place = rng.randrange(len(data) + 1)
        length = int(rng.random() ** 3 * 40)
        match rng.randrange(8):
            case 0 | 1 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 2 if place < len(data):
                data[place] = rng.choice(_TELLING)
            case 3:
                del data[place : place + length]
            case 4:
                data[place:place] = rng.randbytes(length)
            case 5:
                data[place:place] = data[place : place + length]
            case 6:
                data[place : place + 4] = struct.pack(">I", rng.choice(_LIES))
            case _:
                other = rng.choice(self._originals)
                start = rng.randrange(len(other) + 1)
                data[place : place + length] = other[start : start + length]
