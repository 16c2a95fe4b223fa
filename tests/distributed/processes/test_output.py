"""Lines of a process, labelled; and its last words."""

import io
import os

import pytest

from replicator.distributed.processes.output import LabelledLines


@pytest.fixture
def stream():
    """A labelled stream, what it is written to, and the end that feeds it."""
    source, feed = os.pipe()
    to = io.BytesIO()
    lines = LabelledLines(source, "[2] ", to)
    with open(feed, "wb", buffering=0) as writer:
        yield lines, to, writer


def test_each_line_gets_its_label(stream):
    lines, to, writer = stream
    writer.write(b"one\ntwo\n")
    assert lines.pump()
    assert to.getvalue() == b"[2] one\n[2] two\n"
    lines.close()


def test_half_a_line_waits_for_its_other_half(stream):
    lines, to, writer = stream
    writer.write(b"hal")
    lines.pump()
    assert to.getvalue() == b""
    writer.write(b"f\n")
    lines.pump()
    assert to.getvalue() == b"[2] half\n"
    lines.close()


def test_the_last_half_line_is_not_lost(stream):
    lines, to, writer = stream
    writer.write(b"a\nlast words")
    lines.close()
    assert to.getvalue() == b"[2] a\n[2] last words\n"


def test_a_line_without_end_does_not_fill_the_memory(stream):
    lines, to, writer = stream
    for _ in range(4):
        writer.write(b"x" * 40_000)
        lines.pump()
    assert len(to.getvalue()) > 80_000
    lines.close()


def test_a_stream_that_ended_says_so(stream):
    lines, _, writer = stream
    writer.close()
    assert not lines.pump()
    lines.close()


def test_the_last_traceback_is_told_from_its_start(stream):
    lines, _, writer = stream
    writer.write(b"noise\n" * 50)
    writer.write(b"Traceback (most recent call last):\n  File x\nKeyError: 1\n\n")
    writer.write(b"During handling of it, another exception occurred:\n\n")
    writer.write(b"Traceback (most recent call last):\n  File y\nValueError: 2\n")
    writer.write(b"after it\n")
    lines.pump()
    words = lines.last_lines()
    assert words[0] == b"Traceback (most recent call last):"
    assert words.index(b"KeyError: 1") < words.index(b"ValueError: 2")
    assert words[-1] == b"after it"
    lines.close()


def test_an_older_traceback_is_not_told(stream):
    lines, _, writer = stream
    writer.write(b"Traceback (most recent call last):\nKeyError: 1\nwent on\n")
    writer.write(b"Traceback (most recent call last):\nValueError: 2\n")
    lines.pump()
    assert lines.last_lines()[1:] == [b"ValueError: 2"]
    lines.close()


def test_without_a_traceback_the_last_lines_are_told(stream):
    lines, _, writer = stream
    writer.write(b"".join(b"%d\n" % n for n in range(100)))
    lines.pump()
    assert lines.last_lines()[-1] == b"99"
    assert len(lines.last_lines()) == 20
    lines.close()
