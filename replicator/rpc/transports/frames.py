"""Put one message into bytes for a stream of them, and cut the stream again.

    header   magic, kind, flags, version, call id, sizes               28 bytes
    head     what the codec wrote                                      checked
    lengths  8 bytes for each buffer                                   checked
    where    segment and offset, if the far buffers are in shared memory   checked
    near     buffers of up to `NEAR_BYTES`                             checked
    CRC-32   of all of the above
    far      the larger buffers, each at a multiple of 64              not checked

Small buffers are worth a checksum and ride with the head; large ones are not (the kernel
copies them, and a checksum would take longer than the copy), and lie where a receiver
may hold each without holding the rest of the frame. All that a header says is held
against the limits before memory is asked for, and against the checksum before it is used.

Pure: bytes in, frames out. Memory and shared memory are asked for by two callables.
"""

import itertools
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.message_limits import MessageLimits

READ_BYTES = 65_536
"""How much is read at once where it is not known what comes."""
NEAR_BYTES = 4_096
_FAR_ALIGNMENT = 64
_NEAR_ALIGNMENT = 16

MAGIC = b"RPLF"
VERSION = 1
SHARED = 1  # flag: the far buffers are in shared memory

_HEADER = struct.Struct("<4sBBHQIII")
HEADER_BYTES = _HEADER.size
_WHERE = struct.Struct("<IIQ")
_CRC_BYTES = 4
# The CRC-32 of anything that is followed by its own CRC-32: one call checks a frame.
_RIGHT_CRC = 0x2144DF1C
_ZEROS = bytes(_FAR_ALIGNMENT)

Buffer = memoryview | bytes
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from
_crc32 = zlib.crc32


class Where(NamedTuple):
    """Where far buffers lie in shared memory."""

    segment: int
    offset: int


class Frame(NamedTuple):
    """One message as it was received; buffers are read-only."""

    kind: int
    call_id: int
    head: bytes
    buffers: Sequence[memoryview]


class Layout(NamedTuple):
    """Where each buffer of a message goes."""

    lengths: list[int]
    near: list[Buffer]
    far: list[tuple[int, Buffer]]
    """Buffers with their offsets from the first."""
    far_bytes: int


def frame_without_buffers(kind: int, call_id: int, head: bytes) -> bytes:
    """Return the whole frame of a message that has no buffers."""
    size = len(head)
    frame = _pack_header(MAGIC, kind, 0, VERSION, call_id, size, 0, size) + head
    return frame + _crc32(frame).to_bytes(_CRC_BYTES, "little")


def lay_out(buffers: Sequence[Buffer]) -> Layout:
    """Decide where each buffer goes."""
    lengths, near, far, far_bytes = [], [], [], 0
    for buffer in buffers:
        length = len(buffer)
        lengths.append(length)
        if length <= NEAR_BYTES:
            near.append(buffer)
        else:
            offset = _up(far_bytes, _FAR_ALIGNMENT)
            far.append((offset, buffer))
            far_bytes = offset + length
    return Layout(lengths, near, far, far_bytes)


def frame_with_buffers(
    kind: int, call_id: int, head: bytes, *, layout: Layout, where: Where | None
) -> list[Buffer]:
    """Return a frame as parts that are to be sent one after the other.

    Args:
      kind: Of the message.
      call_id: Of the message.
      head: What the codec wrote.
      layout: From `lay_out`.
      where: Where the far buffers lie in shared memory; None sends them.
    """
    lengths = layout.lengths
    parts: list[Buffer] = [head, struct.pack(f"<{len(lengths)}Q", *lengths)]
    flags = 0
    if where is not None:
        flags = SHARED
        parts.append(_WHERE.pack(*where, layout.far_bytes))
    size = HEADER_BYTES + sum(map(len, parts))
    for buffer in layout.near:
        padding = -size % _NEAR_ALIGNMENT
        parts += _ZEROS[:padding], buffer
        size += padding + len(buffer)
    # What follows the checksum is aligned as well, where the frame is read whole.
    padding = -(size + _CRC_BYTES) % _NEAR_ALIGNMENT
    parts.append(_ZEROS[:padding])
    checked_bytes = size + padding - HEADER_BYTES
    numbers = (call_id, len(head), len(lengths), checked_bytes)
    checked = b"".join((_pack_header(MAGIC, kind, flags, VERSION, *numbers), *parts))
    first = checked + _crc32(checked).to_bytes(_CRC_BYTES, "little")
    return [first] if where is not None else [first, *_padded(layout.far)]


class FrameReader:
    """Cut what arrives into frames.

    Bytes come in by `feed`, or, while a large frame is under way, by filling `target`.
    After an error it is of no more use: where the next frame begins is not known.
    """

    def __init__(
        self,
        limits: MessageLimits,
        *,
        allocate: Callable[[int], memoryview],
        open_shared: Callable[[Where, int], memoryview],
    ) -> None:
        """Start at the beginning of a stream.

        Args:
          limits: What a frame may hold.
          allocate: Returns writable memory for so many bytes.
          open_shared: Returns read-only far buffers that lie in shared memory.
        """
        self._limits = limits
        self._allocate = allocate
        self._open_shared = open_shared
        self._data = b""
        self._start = 0
        self._ready: Frame | None = None
        self._target: memoryview | None = None
        self._filled = 0
        self._finish: Callable[[], Frame | None] = lambda: None

    @property
    def is_between_frames(self) -> bool:
        """Tell whether no part of a frame has been read without the rest of it."""
        return self._start == len(self._data) and self._target is None

    @property
    def target(self) -> memoryview | None:
        """Return where the next bytes belong; None: `feed` takes them."""
        return None if self._target is None else self._target[self._filled :]

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        if self._start != len(self._data):
            data = self._data[self._start :] + data
        self._data = data
        self._start = 0

    def filled(self, num_bytes: int) -> Frame | None:
        """Take note that `num_bytes` were put into `target`.

        Returns:
          The frame, if it is whole now.

        Raises:
          DecodeError: It is no frame of ours.
          MessageTooLargeError: It says that it is larger than the limits.
        """
        assert self._target is not None
        self._filled += num_bytes
        if self._filled < len(self._target):
            return None
        finish, self._target, self._filled = self._finish, None, 0
        self._finish = lambda: None  # it holds the frame's memory
        return finish()

    def next_frame(self) -> Frame | None:
        """Return the next frame; None: more bytes are needed.

        Raises:
          DecodeError: What came is no frame of ours.
          MessageTooLargeError: It says that it is larger than the limits.
        """
        if self._ready is not None:
            frame, self._ready = self._ready, None
            return frame
        data, start = self._data, self._start
        if len(data) - start < HEADER_BYTES or self._target is not None:
            return None
        header = _unpack_header(data, start)
        magic, kind, flags, version, call_id, head_bytes, num_buffers, size = header
        limits = self._limits
        # One test for what is nearly always so; the others tell what is wrong.
        if (
            magic != MAGIC
            or version != VERSION
            or flags
            or num_buffers
            or head_bytes != size
            or size > limits.head_bytes
        ):
            _check_header(header, limits)
        end = start + HEADER_BYTES + size + _CRC_BYTES
        if end > len(data):
            if size > READ_BYTES:
                self._fill_checked(header, end - start)
            return None
        checked = data[start:end]
        if num_buffers:
            return self._frame_with_buffers(header, checked, end)
        if _crc32(checked) != _RIGHT_CRC:
            raise _corrupted(kind)
        self._start = end
        return Frame(kind, call_id, checked[HEADER_BYTES:-_CRC_BYTES], ())

    def has_frame(self) -> bool:
        """Tell whether `next_frame` returns one, or raises, without more bytes."""
        if self._ready is None and self._start != len(self._data):
            try:
                self._ready = self.next_frame()
            except (DecodeError, MessageTooLargeError):
                return True  # `next_frame` meets it again
        return self._ready is not None

    def _fill_checked(self, header: tuple, size: int) -> None:
        memory = self._allocate(size)

        def finish() -> Frame | None:
            checked = memory.toreadonly()
            return self._frame_with_buffers(header, checked, None)

        self._fill(memory, self._start, finish)

    def _frame_with_buffers(
        self, header: tuple, checked: bytes | memoryview, end: int | None
    ) -> Frame | None:
        """Return the frame, or arrange for the far buffers to be read.

        `end` is where `checked` ends in what was fed; None: it was not fed.
        """
        kind, flags, call_id = header[1], header[2], header[4]
        if _crc32(checked) != _RIGHT_CRC:
            raise _corrupted(kind)
        contents = _Contents.read(header, checked, self._limits)
        if end is None:
            self._data, self._start, end = b"", 0, 0
        far_bytes = contents.far_bytes
        if flags & SHARED or not far_bytes:
            far = memoryview(b"")
            if flags & SHARED:
                far = self._open_shared(contents.where, far_bytes)
            self._start = end
            return contents.frame(kind, call_id, far)
        if end + far_bytes <= len(self._data):
            # A copy if it is not all that was read: aligned, and holds nothing else.
            whole = self._data[end - len(checked) : end + far_bytes]
            self._start = end + far_bytes
            far = memoryview(whole)[len(checked) :]
            return contents.frame(kind, call_id, far)
        memory = self._allocate(far_bytes)
        self._fill(
            memory, end, lambda: contents.frame(kind, call_id, memory.toreadonly())
        )
        return None

    def _fill(
        self, memory: memoryview, start: int, finish: Callable[[], Frame | None]
    ) -> None:
        """Let `memory` be filled, first with what was fed from `start` on."""
        available = len(self._data) - start
        memory[:available] = memoryview(self._data)[start:]
        self._data, self._start = b"", 0
        self._target, self._filled, self._finish = memory, available, finish


class _Contents(NamedTuple):
    """What the checked part of a frame says."""

    head: bytes
    lengths: tuple[int, ...]
    near: list[memoryview]
    far_bytes: int
    where: Where

    @classmethod
    def read(
        cls, header: tuple, checked: bytes | memoryview, limits: MessageLimits
    ) -> "_Contents":
        """Read it; the checksum was right, so what is wrong here is a lie."""
        _, _, flags, _, _, head_bytes, num_buffers, size = header
        view = memoryview(checked)
        at = HEADER_BYTES + head_bytes
        head = bytes(view[HEADER_BYTES:at])
        lengths = struct.unpack_from(f"<{num_buffers}Q", view, at)
        at += 8 * num_buffers
        if head_bytes + sum(lengths) > limits.message_bytes:
            raise _too_large("bytes", head_bytes + sum(lengths), limits.message_bytes)
        where, told = Where(0, 0), None
        if flags & SHARED:
            *place, told = _WHERE.unpack_from(view, at)
            where = Where(*place)
            at += _WHERE.size
        near, far_bytes = [], 0
        for length in lengths:
            if length <= NEAR_BYTES:
                at = _up(at, _NEAR_ALIGNMENT)
                near.append(view[at : at + length])
                at += length
            else:
                far_bytes = _up(far_bytes, _FAR_ALIGNMENT) + length
        if lengths:
            at += -(at + _CRC_BYTES) % _NEAR_ALIGNMENT
        is_shared_right = told is None or 0 < told == far_bytes
        if at != HEADER_BYTES + size or not is_shared_right:
            raise DecodeError("The lengths in a frame's head do not add up to its size.")
        return cls(head, lengths, near, far_bytes, where)

    def frame(self, kind: int, call_id: int, far: memoryview) -> Frame:
        """Return the frame with its buffers in the order that they were sent in."""
        near, at = iter(self.near), 0
        buffers = []
        for length in self.lengths:
            if length <= NEAR_BYTES:
                buffers.append(next(near))
            else:
                at = _up(at, _FAR_ALIGNMENT)
                buffers.append(far[at : at + length])
                at += length
        return Frame(kind, call_id, self.head, buffers)


def _check_header(header: tuple, limits: MessageLimits) -> None:
    magic, _, flags, version, _, head_bytes, num_buffers, size = header
    if magic != MAGIC:
        raise DecodeError(f"A frame must start with {MAGIC!r}, got {magic!r}.")
    if version != VERSION:
        raise DecodeError(f"A frame must be of version {VERSION}, got {version}.")
    if head_bytes > limits.head_bytes:
        raise _too_large("bytes of head", head_bytes, limits.head_bytes)
    if num_buffers > limits.leaves:
        raise _too_large("arrays", num_buffers, limits.leaves)
    least = head_bytes + 8 * num_buffers + (_WHERE.size if flags & SHARED else 0)
    most = least + num_buffers * (NEAR_BYTES + _NEAR_ALIGNMENT) + _NEAR_ALIGNMENT
    is_right = least <= size <= most if num_buffers else size == head_bytes
    if flags & ~SHARED or (flags and not num_buffers) or not is_right:
        raise DecodeError("The sizes in a frame's header contradict each other.")


def _too_large(what: str, number: int, limit: int) -> MessageTooLargeError:
    return MessageTooLargeError(
        f"A message must have at most {limit} {what}, got a frame that says {number}. "
        "Send less at once, or raise `MessageLimits` at both ends."
    )


def _corrupted(kind: int) -> DecodeError:
    return DecodeError(f"The checksum of a frame (kind {kind}) is wrong.")


def _padded(far: list[tuple[int, Buffer]]) -> list[Buffer]:
    """Return the buffers with zeros between them, so that each is at its offset."""
    parts: list[Buffer] = []
    at = 0
    for offset, buffer in far:
        parts += _ZEROS[: offset - at], buffer
        at = offset + len(buffer)
    return [part for part in itertools.chain(parts) if len(part)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
