"""What cannot be written is dropped and counted, and fails nobody."""

import errno
import io
import os
import sys
import threading

import pytest

from replicator.base.host.standard_streams import (
    lossy,
    lossy_output,
    say_raw,
    take_loss,
)


@pytest.fixture
def lead_to():
    """Have descriptor 1 lead elsewhere, until the test is over."""
    saved = os.dup(1)

    def lead(descriptor):
        os.dup2(descriptor, 1)
        os.close(descriptor)

    yield lead
    take_loss()
    os.dup2(saved, 1)
    os.close(saved)


@pytest.fixture
def plain():
    """Standard output as a process has it, under pytest, too."""
    with open(1, "w", closefd=False) as stream:
        yield stream


@pytest.fixture
def out(plain):
    return lossy(plain)


def full():
    return os.open("/dev/full", os.O_WRONLY)


def test_lines_that_a_full_disk_refuses_are_counted(lead_to, out):
    lead_to(full())
    print("one\ntwo", file=out)
    print("three", file=out, flush=True)
    told, why = take_loss()
    assert (
        told == "3 lines of the output could not be written: No space left on device."
    )
    assert why.errno == errno.ENOSPC
    assert take_loss() is None


def test_nobody_who_reads_is_no_error(lead_to, out):
    read_end, write_end = os.pipe()
    os.close(read_end)
    lead_to(write_end)
    print("one", file=out)
    assert isinstance(take_loss()[1], BrokenPipeError)


def test_once_there_is_room_the_next_line_says_what_is_missing(lead_to, out, tmp_path):
    lead_to(full())
    print("one\ntwo", file=out)
    lead_to(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    print("three", file=out)
    assert (tmp_path / "log").read_text() == (
        "\n... 2 lines could not be written here\nthree\n"
    )


def test_what_was_printed_before_comes_first(lead_to, plain, tmp_path):
    lead_to(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    plain.write("one\n")
    print("two", file=lossy(plain))
    assert (tmp_path / "log").read_text() == "one\ntwo\n"


def test_a_pipe_that_does_not_wait_gets_all_of_a_long_text(lead_to, out):
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    lead_to(write_end)
    text, read = "x" * 300_000 + "\n", []
    with open(read_end) as pipe:
        reader = threading.Thread(target=lambda: read.append(pipe.read()))
        reader.start()
        out.write(text)
        lead_to(full())  # closes the pipe's other end
        reader.join(60)
    assert read == [text]


def test_a_letter_that_the_locale_lacks_is_written_out(lead_to, tmp_path):
    lead_to(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    with open(1, "w", closefd=False, encoding="ascii") as stream:
        print("3 µs", file=lossy(stream))
    assert (tmp_path / "log").read_text() == "3 \\xb5s\n"


def test_a_stream_that_is_no_descriptor_is_left_alone():
    stream = io.StringIO()
    assert lossy(stream) is stream


def test_what_was_closed_leads_nowhere(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with lossy_output():
        print("one", flush=True)
        assert not sys.stdout.isatty()
    assert sys.stdout is None
    assert take_loss() is None


def test_what_a_signal_handler_says_fails_nowhere():
    saved = os.dup(2)
    os.dup2(disk := full(), 2)
    try:
        say_raw("one\n")
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(disk)
