"""Frames survive being cut anywhere; what is no frame is refused with the reason."""

import contextlib
import random
import struct
import zlib

import pytest

from replicator.errors import DecodeError, MessageTooLargeError
from replicator.rpc.codec.message_limits import MessageLimits
from replicator.rpc.transports import frames
from replicator.rpc.transports.frames import (
    CHECKED_BODY_BYTES,
    HEADER_BYTES,
    READ_BYTES,
    Where,
    frame_with_buffers,
    frame_with_shared_body,
    frame_without_buffers,
    lay_out,
)

LIMITS = MessageLimits(message_bytes=1 << 20, head_bytes=1 << 18)
SHARED_BODY = memoryview(b"shared")
WHERE = Where(3, 4096, 7, 9)
BODIES = {
    "none": [],
    "small": [b"a" * 5000],
    "several": [b"a" * 5000, b"b" * 77, b"c" * 6001],
    "checked": [b"a" * CHECKED_BODY_BYTES],
    "not checked": [b"a" * (CHECKED_BODY_BYTES + 1)],
    "large": [b"a" * 100_001, b"b" * 70_000],
}
HEADS = {"short": b"head", "empty": b"", "long": bytes(range(256)) * 600}


def framed(head, buffers, *, kind=1, call_id=5):
    if not buffers:
        return frame_without_buffers(kind, call_id, head)
    layout = lay_out([memoryview(buffer) for buffer in buffers])
    return b"".join(frame_with_buffers(kind, call_id, head, layout=layout))


def body_of(buffers):
    layout = lay_out([memoryview(buffer) for buffer in buffers])
    body = bytearray(layout.num_bytes)
    for offset, buffer in zip(layout.offsets, buffers, strict=True):
        body[offset : offset + len(buffer)] = buffer
    return bytes(body)


class Stream:
    """A reader, and what it asked for."""

    def __init__(self, limits=LIMITS):
        self.allocated = []
        self.opened = []
        self.reader = frames.FrameReader(
            limits, allocate=self.allocate, open_shared=self.open_shared
        )

    def allocate(self, num_bytes):
        self.allocated.append(num_bytes)
        return memoryview(bytearray(num_bytes))

    def open_shared(self, where, num_bytes):
        self.opened.append((where, num_bytes))
        return SHARED_BODY

    def read(self, data, piece_bytes=READ_BYTES):
        """Feed data in pieces, as a socket gives them; return the frames."""
        found = []
        while data:
            target = self.reader.target
            size = min(piece_bytes, len(data))
            if target is None:
                frame = self.reader.read(data[:size])
            else:
                size = min(size, len(target))
                target[:size] = data[:size]
                frame = self.reader.filled(size)
            data = data[size:]
            while frame is not None:
                found.append(frame)
                frame = self.reader.next_frame()
        return found


def refused(data, error=DecodeError, limits=LIMITS):
    with pytest.raises(error) as caught:
        Stream(limits).read(data)
    return str(caught.value)


def altered(frame, offset, form, value):
    """Change a number in a header, and make the checksum right again."""
    changed = bytearray(frame)
    struct.pack_into(form, changed, offset, value)
    del changed[-4:]
    return bytes(changed) + zlib.crc32(changed).to_bytes(4, "little")


@pytest.mark.parametrize("piece_bytes", [1009, 40_000, READ_BYTES])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("buffers", BODIES.values(), ids=BODIES)
def test_frames_arrive_whatever_they_are_cut_into(head, buffers, piece_bytes):
    data = framed(head, buffers, call_id=2**64 - 1) + framed(b"next", [])
    first, second = Stream().read(data, piece_bytes)
    assert first[:3] == (1, 2**64 - 1, head)
    assert bytes(first.body) == body_of(buffers)
    assert second == (1, 5, b"next", b"")


def test_frames_arrive_byte_by_byte():
    wanted = [(b"one", []), (b"two", [b"x" * 300]), (b"", [b"y" * 17_000])]
    data = b"".join(framed(head, buffers) for head, buffers in wanted)
    found = Stream().read(data, 1)
    assert [(f.head, bytes(f.body)) for f in found] == [
        (head, body_of(buffers)) for head, buffers in wanted
    ]


def test_several_frames_come_of_one_read():
    data = b"".join(framed(bytes([n]), [b"z" * n * 99]) for n in range(1, 30))
    assert [frame.head for frame in Stream().read(data)] == [
        bytes([n]) for n in range(1, 30)
    ]


def test_has_frame_tells_without_taking():
    reader = Stream().reader
    assert not reader.has_frame()
    data = framed(b"one", []) + framed(b"two", [b"x" * 400])
    reader.feed(data[:-1])
    assert reader.has_frame()
    assert reader.has_frame()
    assert reader.next_frame().head == b"one"
    assert not reader.has_frame()
    reader.feed(data[-1:])
    assert reader.has_frame()
    assert reader.next_frame().head == b"two"
    assert not reader.has_frame()
    assert reader.is_between_frames


def test_an_error_that_has_frame_met_is_met_again():
    reader = Stream().reader
    reader.feed(b"x" * 100)
    assert reader.has_frame()
    with pytest.raises(DecodeError):
        reader.next_frame()


@pytest.mark.parametrize("piece_bytes", [10, READ_BYTES])
def test_a_shared_body_is_opened_where_the_frame_says(piece_bytes):
    frame = frame_with_shared_body(2, 8, b"head", num_bytes=500_000, where=WHERE)
    stream = Stream()
    assert stream.read(frame, piece_bytes) == [(2, 8, b"head", SHARED_BODY)]
    assert stream.opened == [(WHERE, 500_000)]
    assert stream.allocated == []


def test_bodies_are_read_only_and_aligned():
    for buffers in BODIES.values():
        (frame,) = Stream().read(framed(b"head", buffers))
        assert memoryview(frame.body).readonly
        at = framed(b"head", buffers).find(bytes(frame.body)[:5000])
        assert not buffers or at % 16 == 0


def test_a_small_body_holds_no_other_frame():
    data = framed(b"one", [b"x" * 5000]) + framed(b"two", [b"y" * 20_000])
    first, second = Stream().read(data)
    assert len(first.body.obj) < 6000
    assert len(second.body.obj) == 20_000


# Refusals.


def test_every_flipped_bit_of_a_checked_frame_is_found():
    frame = framed(b"some head", [b"x" * 33])
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        stream = Stream()
        try:
            found = stream.read(bytes(changed))
        except (DecodeError, MessageTooLargeError):
            continue
        assert found == []  # it says that it is longer, and waits for more
        assert sum(stream.allocated) <= LIMITS.message_bytes


def test_a_large_body_is_not_waited_for_if_the_head_is_corrupted():
    frame = bytearray(framed(b"some head", [b"x" * 50_000]))
    frame[20] ^= 1
    assert "checksum" in refused(bytes(frame[:1000]))


def test_what_is_no_frame_is_refused():
    assert "RPLF" in refused(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert "version" in refused(altered(framed(b"head", []), 6, "<H", 9))
    for flags in (1, 2, 255):
        assert "flags" in refused(altered(framed(b"head", []), 5, "<B", flags))


@pytest.mark.parametrize("size", [LIMITS.head_bytes + 1, 2**32 - 1])
def test_a_head_past_the_limit_is_refused_before_it_is_read(size):
    header = altered(framed(b"head", []), 16, "<I", size)[:HEADER_BYTES]
    stream = Stream()
    with pytest.raises(MessageTooLargeError, match=str(LIMITS.head_bytes)):
        stream.read(header)
    assert stream.allocated == []


@pytest.mark.parametrize("size", [LIMITS.message_bytes, 2**63, 2**64 - 1])
def test_a_body_past_the_limit_is_refused_before_memory_is_asked_for(size):
    frame = altered(framed(b"head", []), 20, "<Q", size)
    stream = Stream()
    with pytest.raises(MessageTooLargeError, match=str(LIMITS.message_bytes)):
        stream.read(frame)
    assert stream.allocated == []


def test_small_limits_hold_for_small_frames():
    limits = MessageLimits(message_bytes=100, head_bytes=50)
    assert len(Stream(limits).read(framed(b"x" * 50, []))) == 1
    refused(framed(b"x" * 51, []), MessageTooLargeError, limits)
    refused(framed(b"x" * 50, [b"y" * 51]), MessageTooLargeError, limits)
    shared = frame_with_shared_body(1, 1, b"x" * 50, num_bytes=51, where=WHERE)
    refused(shared, MessageTooLargeError, limits)


def test_check_fits_counts_what_lies_between_buffers():
    layout = lay_out([memoryview(b"x")] * 3)
    assert layout.num_bytes == 129
    frames.check_fits(b"h", layout, MessageLimits(message_bytes=130))
    with pytest.raises(MessageTooLargeError, match="130"):
        frames.check_fits(b"h", layout, MessageLimits(message_bytes=129))


def test_random_streams_end_in_frames_or_typed_errors():
    generator = random.Random(0)
    frame = framed(b"some head", [b"x" * 33]) + framed(b"", [b"y" * 17_000])
    for _ in range(500):
        data = bytearray(frame)
        for _ in range(generator.randrange(4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        cut = generator.choice([0, 0, generator.randrange(len(data))])
        stream = Stream()
        with contextlib.suppress(DecodeError, MessageTooLargeError):
            pieces = generator.choice([7, 999, READ_BYTES])
            stream.read(bytes(data[cut:] + data[:cut]), pieces)
        assert sum(stream.allocated) <= LIMITS.message_bytes
