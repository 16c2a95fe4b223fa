"""Frames that arrive in any pieces, behind whatever a login shell prints."""

import os

import pytest

from replicator.distributed.remote.frames import (
    PREAMBLE,
    Frames,
    Outbox,
    frame,
    read_some,
)

SENT = [(b"1", b""), (b"2", bytes(range(256))), (b"e", b"-9")]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_are_whole_in_whatever_pieces_they_arrive(size):
    stream = b"".join(frame(*each) for each in SENT)
    frames = Frames()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [each for piece in pieces for each in frames.feed(piece)] == SENT


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_a_shell_prints_before_the_first_frame_is_dropped(size):
    stream = b"Welcome!\n\0replicator\n" + PREAMBLE + frame(b"1", b"x")
    frames = Frames(PREAMBLE)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    found = [each for piece in pieces for each in frames.feed(piece)]
    assert found == [(b"1", b"x")]


def test_a_full_pipe_does_not_hold_up_who_writes():
    read, write = os.pipe()
    outbox = Outbox(write)
    data = os.urandom(1 << 20)
    outbox.put(data)
    outbox.flush()
    assert outbox.is_full
    os.set_blocking(read, False)
    received = b""
    while outbox:
        received += read_some(read) or b""
        outbox.flush()
    os.close(write)
    while more := read_some(read):
        received += more
    os.close(read)
    assert received == data


def test_a_pipe_that_nobody_reads_is_an_error():
    read, write = os.pipe()
    outbox = Outbox(write)
    os.close(read)
    outbox.put(b"x")
    with pytest.raises(BrokenPipeError):
        outbox.flush()
    os.close(write)


def test_what_is_too_long_to_be_a_frame_takes_no_memory():
    with pytest.raises(ValueError, match="4294967295 bytes"):
        Frames().feed(b"1\xff\xff\xff\xffx")


def test_text_after_the_last_frame_hides_none():
    frames = Frames()
    assert frames.feed(frame(b"e", b"7") + b"Goodbye\n") == [(b"e", b"7")]
    with pytest.raises(ValueError, match="bytes"):
        frames.feed(b"x")
