"""Encode messages as frames of a byte stream, and cut the stream into frames again.

    header   magic, kind, flags, version, call id, bytes of head and body    28 bytes
    head     what the codec wrote
    where    if the body is in shared memory: `Where`
    padding  to a multiple of 16, if there is a body, and it follows
    body     if it has at most `CHECKED_BODY_BYTES`
    CRC-32   of all of the above
    body     otherwise, unless it is in shared memory

The body is the codec's buffers, each at a multiple of 64. A small one is worth a
checksum; a large one is not: the kernel copies it, and a checksum takes longer than the
copy. A header is checked against the limits before memory is allocated, and against the
checksum before a large body is waited for. Pure, but for two callables that provide
memory and shared memory.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec import wire_format
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.codec.receive_memory import receive_memory

READ_BYTES = 65_536
"""Bytes to read at once where the size of the next frame is not known."""
CHECKED_BODY_BYTES = 16_384
MAGIC = b"RPLF"
VERSION = 1
SHARED = 1  # flag: the body is in shared memory

_HEADER = struct.Struct("<4sBBHQIQ")
HEADER_BYTES = _HEADER.size
_WHERE = struct.Struct("<IQII")
_CRC_BYTES = 4
_SHARED_END_BYTES = _WHERE.size + _CRC_BYTES
_FRAME_BYTES = HEADER_BYTES + _CRC_BYTES
# The CRC-32 of anything that is followed by its own CRC-32: one call checks a frame.
_RIGHT_CRC = 0x2144DF1C
# A frame that is read whole lies at a multiple of this; its body must, too.
_ALIGNMENT = 16
_AT_0 = (0,)
_ZEROS = bytes(wire_format.ALIGNMENT)

Buffer = memoryview | bytes
Body = memoryview | bytes | np.ndarray
"""Bytes; an array of them where they lie in shared memory."""
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_unpack_start = struct.Struct("<8sQIQ").unpack_from  # the first four fields in one
_pack_where = _WHERE.pack
_pack_crc = struct.Struct("<I").pack
_unpack_where = _WHERE.unpack_from
_new_tuple = tuple.__new__  # a named one at half the price
_crc32 = zlib.crc32


def _starts(flags: int) -> dict[bytes, int]:
    """Return the kind by the first 8 bytes of a frame with such flags."""
    return {_pack_header(MAGIC, k, flags, VERSION, 0, 0, 0)[:8]: k for k in range(256)}


_STARTS, _SHARED_STARTS = _starts(0), _starts(SHARED)


class Where(NamedTuple):
    """Place of a body in shared memory, and the slot by which it is released."""

    segment: int
    offset: int
    slot: int
    uses: int


class FrameHeader(NamedTuple):
    """Header of a frame."""

    magic: bytes
    kind: int
    flags: int
    version: int
    call_id: int
    head_bytes: int
    body_bytes: int


class MessageFrame(NamedTuple):
    """One message as it was received; the body is read-only."""

    kind: int
    call_id: int
    head: bytes
    body: Body


class BufferLayout(NamedTuple):
    """Buffers of a body, with the offset of each."""

    buffers: Sequence[Buffer]
    offsets: Sequence[int]
    num_bytes: int


def lay_out(buffers: Sequence[memoryview]) -> BufferLayout:
    """Place buffers in a body.

    >>> lay_out([memoryview(bytes(70)), memoryview(bytes(8))]).offsets
    [0, 128]
    """
    if len(buffers) == 1:
        return _new_tuple(BufferLayout, (buffers, _AT_0, len(buffers[0])))
    return BufferLayout(buffers, *wire_format.lay_out(buffers))


def check_fits(head: bytes, layout: BufferLayout, limits: MessageLimits) -> None:
    """Refuse to send a message that a receiver with the same limits would refuse.

    The codec has counted the buffers; the padding between them counts as well.

    Raises:
      MessageTooLargeError: It exceeds the limit.
    """
    num_bytes = len(head) + layout.num_bytes
    if num_bytes > limits.message_bytes:
        raise wire_format.too_large(
            "bytes, with the space between its arrays",
            num_bytes,
            "message_bytes",
            limits.message_bytes,
        )


def frame_without_buffers(kind: int, call_id: int, head: bytes) -> bytes:
    """Return the whole frame of a message that has no body.

    >>> frame = frame_without_buffers(1, 7, b"head")
    >>> FrameReader(MessageLimits()).read(frame)
    MessageFrame(kind=1, call_id=7, head=b'head', body=b'')
    """
    frame = _pack_header(MAGIC, kind, 0, VERSION, call_id, len(head), 0) + head
    return frame + _pack_crc(_crc32(frame))


def frame_with_shared_body(
    kind: int, call_id: int, head: bytes, *, num_bytes: int, where: Where
) -> bytes:
    """Return the frame of a message whose body of `num_bytes` is in shared memory."""
    header = _pack_header(MAGIC, kind, SHARED, VERSION, call_id, len(head), num_bytes)
    frame = b"".join((header, head, _pack_where(*where)))
    return frame + _pack_crc(_crc32(frame))


def frame_with_buffers(
    kind: int, call_id: int, head: bytes, *, layout: BufferLayout
) -> list[Buffer]:
    """Return a frame as parts that are to be sent one after the other.

    Args:
      kind: Kind of the message.
      call_id: Call of the message.
      head: Head that the codec wrote.
      layout: Layout of the buffers.
    """
    numbers = (call_id, len(head), layout.num_bytes)
    header = _pack_header(MAGIC, kind, 0, VERSION, *numbers)
    is_checked = layout.num_bytes <= CHECKED_BODY_BYTES
    padding = _ZEROS[: _padding(HEADER_BYTES + len(head), is_checked)]
    body = _padded(layout)
    checked = b"".join((header, head, padding, *(body if is_checked else ())))
    first = checked + _pack_crc(_crc32(checked))
    return [first] if is_checked else [first, *body]


def refuse_shared(where: Where, num_bytes: int) -> NoReturn:
    """Refuse a body in shared memory, on a connection without it."""
    raise DecodeError("Shared memory was named on a connection without it.")


class FrameReader:
    """Cut what arrives into frames.

    Bytes come in by `feed`, or, in the middle of a large frame, by filling `target`.
    After an error it is unusable: the start of the next frame is not known. One thread
    uses it, which has the right to read.

    Attributes:
      target: Memory for the next bytes; None: `feed` takes them.
      rest: Bytes that were fed and are not part of a returned frame.
    """

    def __init__(
        self,
        limits: MessageLimits,
        *,
        open_shared: Callable[[Where, int], Body] = refuse_shared,
        allocate: Callable[[int], memoryview] = receive_memory,
    ) -> None:
        """Start at the beginning of a stream.

        Args:
          limits: Limits of a frame.
          open_shared: Returns a read-only body that lies in shared memory.
          allocate: Returns writable memory of the given size.
        """
        self._limits = limits
        self._max_bytes = limits.message_bytes
        self._max_head_bytes = limits.head_bytes
        self._allocate = allocate
        self._open_shared = open_shared
        self.rest = b""
        self._start = 0
        self._ready: MessageFrame | None = None
        self.target: memoryview | None = None
        self._finish: Callable[[], MessageFrame | None] = lambda: None

    @property
    def is_between_frames(self) -> bool:
        """Return whether no frame has been read in part."""
        return not self.rest and self.target is None

    def read(self, data: bytes) -> MessageFrame | None:
        """Take received bytes and return the next frame, like `feed` + `next_frame`."""
        # Nearly always: it is one frame whose body, if there is one, lies elsewhere.
        if not self.rest and len(data) >= _FRAME_BYTES:
            start, call_id, head_bytes, body_bytes = _unpack_start(data)
            kind = (_SHARED_STARTS if body_bytes else _STARTS).get(start)
            end = HEADER_BYTES + head_bytes
            if (
                kind is not None
                and len(data) == end + (_SHARED_END_BYTES if body_bytes else _CRC_BYTES)
                and head_bytes <= self._max_head_bytes
                and head_bytes + body_bytes <= self._max_bytes
                and _crc32(data) == _RIGHT_CRC
            ):
                body = b""
                if body_bytes:
                    where = _new_tuple(Where, _unpack_where(data, end))
                    body = self._open_shared(where, body_bytes)
                return _new_tuple(
                    MessageFrame, (kind, call_id, data[HEADER_BYTES:end], body)
                )
        self.feed(data)
        return self.next_frame()

    def feed(self, data: bytes) -> None:
        """Take received bytes, when there is no `target`."""
        self.rest = self.rest[self._start :] + data
        self._start = 0

    def filled(self, num_bytes: int) -> MessageFrame | None:
        """Note that `num_bytes` were put into `target`; return a frame that is whole.

        Raises:
          DecodeError: It is not a valid frame.
          MessageTooLargeError: Its header exceeds the limits.
        """
        assert self.target is not None
        if num_bytes < len(self.target):
            self.target = self.target[num_bytes:]
            return None
        # Forgotten first: it holds the frame's memory, and may ask for more.
        finish, self._finish, self.target = self._finish, lambda: None, None
        return finish()

    def next_frame(self) -> MessageFrame | None:
        """Return the next frame; None: more bytes are needed.

        Raises:
          DecodeError: The bytes are not a valid frame.
          MessageTooLargeError: Its header exceeds the limits.
        """
        if not self.rest:
            return None
        # `has_frame` may have cut it already; then it is kept until it is asked for.
        frame, self._ready = self._ready or self._next_frame(), None
        if self._start == len(self.rest):
            self.rest, self._start = b"", 0
        return frame

    def has_frame(self) -> bool:
        """Return whether `next_frame` returns one, or raises, without more bytes."""
        if self._ready is None and self.rest:
            try:
                self._ready = self._next_frame()
            except (DecodeError, MessageTooLargeError):
                return True  # `next_frame` meets it again
        return self._ready is not None

    def _next_frame(self) -> MessageFrame | None:
        available = len(self.rest) - self._start
        if available < HEADER_BYTES:
            return None
        header = FrameHeader(*_unpack_header(self.rest, self._start))
        _check_header(header, self._limits)
        size = _checked_bytes(header)
        if available < size:
            if size > READ_BYTES:
                self._fill_checked(header, size)
            return None
        # If it is not all that was read, a copy: aligned, and holds nothing else.
        end = self._start + size
        return self._body_after(header, self.rest[self._start : end], end)

    def _fill_checked(self, header: FrameHeader, size: int) -> None:
        """Read a large head into memory of its own."""
        memory = self._allocate(size)
        checked = memory.toreadonly()
        self._fill(memory, self._start, lambda: self._body_after(header, checked, 0))

    def _body_after(
        self, header: FrameHeader, checked: Buffer, end: int
    ) -> MessageFrame | None:
        """Return the frame, or arrange for its body to be read.

        `end` is where the checked part ends in what was fed.
        """
        if _crc32(checked) != _RIGHT_CRC:
            raise DecodeError(f"The checksum of a frame ({header.kind=}) is wrong.")
        view = memoryview(checked)
        at = HEADER_BYTES + header.head_bytes
        head = bytes(view[HEADER_BYTES:at])
        body_bytes = header.body_bytes
        if header.flags & SHARED:
            where = Where(*_unpack_where(view, at))
            body = self._open_shared(where, body_bytes)
        elif not body_bytes:
            body = b""
        elif body_bytes <= CHECKED_BODY_BYTES:
            body = view[len(view) - _CRC_BYTES - body_bytes : len(view) - _CRC_BYTES]
        elif end + body_bytes <= len(self.rest):
            body = memoryview(self.rest[end : end + body_bytes])
            end += body_bytes
        else:
            memory = self._allocate(body_bytes)
            frame = MessageFrame(header.kind, header.call_id, head, memory.toreadonly())
            self._fill(memory, end, lambda: frame)
            return None
        self._start = end
        return MessageFrame(header.kind, header.call_id, head, body)

    def _fill(
        self, memory: memoryview, start: int, finish: Callable[[], MessageFrame | None]
    ) -> None:
        """Let `memory` be filled, first with what was fed from `start` on."""
        available = len(self.rest) - start
        memory[:available] = memoryview(self.rest)[start:]
        self.rest, self._start = b"", 0
        self.target, self._finish = memory[available:], finish


def _checked_bytes(header: FrameHeader) -> int:
    """Return the size of a frame up to its checksum, with that."""
    size = HEADER_BYTES + header.head_bytes
    if not header.body_bytes:
        return size + _CRC_BYTES
    if header.flags & SHARED:
        return size + _SHARED_END_BYTES
    if header.body_bytes <= CHECKED_BODY_BYTES:
        return size + _padding(size, True) + header.body_bytes + _CRC_BYTES
    return size + _padding(size, False) + _CRC_BYTES


def _padding(size: int, is_checked: bool) -> int:
    """Return the number of zeros that align the body, right behind or past the CRC."""
    return -(size if is_checked else size + _CRC_BYTES) % _ALIGNMENT


def _padded(layout: BufferLayout) -> list[Buffer]:
    """Return the buffers with zeros between them, so that each is at its offset."""
    parts: list[Buffer] = []
    at = 0
    for offset, buffer in zip(layout.offsets, layout.buffers, strict=True):
        if offset > at:
            parts.append(_ZEROS[: offset - at])
        parts.append(buffer)
        at = offset + len(buffer)
    return parts


def _check_header(header: FrameHeader, limits: MessageLimits) -> None:
    if header.magic != MAGIC:
        raise DecodeError(f"A frame must start with {MAGIC!r}, got {header.magic!r}.")
    if header.version != VERSION:
        raise DecodeError(
            f"A frame must be of version {VERSION}, got {header.version}."
        )
    if header.head_bytes > limits.head_bytes:
        raise wire_format.too_large(
            "bytes of head", header.head_bytes, "head_bytes", limits.head_bytes
        )
    num_bytes, most = header.head_bytes + header.body_bytes, limits.message_bytes
    if num_bytes > most:
        raise wire_format.too_large("bytes", num_bytes, "message_bytes", most)
    if header.flags & ~SHARED or (header.flags and not header.body_bytes):
        raise DecodeError(f"A frame must have known flags, got {header.flags}.")
