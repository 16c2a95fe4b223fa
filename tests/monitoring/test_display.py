"""Displays: a bar on a terminal, plain lines elsewhere."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from replicator.monitoring.display import LineDisplay, TerminalDisplay, make_display
from replicator.monitoring.progress import ProgressNumbers


class Terminal(io.StringIO):
    def isatty(self):
        return True


def numbers(**changes):
    known = {
        "step": 100,
        "steps": 1000,
        "time_s": 20.0,
        "elapsed_s": 12.0,
        "compile_s": 3.25,
        "steps_per_s": 9.4,
        "examples_per_s": 812.3,
        "eta_s": 95.7,
        "input_stall_share": 0.031,
    }
    return ProgressNumbers(**known | changes)


UNKNOWN = dict.fromkeys(
    ["steps_per_s", "examples_per_s", "eta_s", "input_stall_share"], None
)


def shown(display, stream, *, scalars, **changes):
    display.show(numbers(**changes), scalars)
    display.close()
    return stream.getvalue()


def test_a_line_says_it_all():
    stream = io.StringIO()
    text = shown(LineDisplay(stream), stream, scalars={"grad_norm": 1.2, "loss": 0.31})
    assert text == (
        "step 100/1000  loss 0.31  grad_norm 1.2  812 examples/s  9.4 steps/s  "
        "ETA 1m36s  input 3 %\n"
    )


def test_the_first_line_says_how_long_compiling_took():
    stream = io.StringIO()
    text = shown(LineDisplay(stream), stream, scalars={"loss": 2.3}, step=1, **UNKNOWN)
    assert text == "step 1/1000  loss 2.3  compiled in 3.2s\n"


def test_a_run_without_an_end_shows_neither_end_nor_time_left():
    stream = io.StringIO()
    text = shown(LineDisplay(stream), stream, scalars={}, steps=None, eta_s=None)
    assert text.startswith("step 100  812 examples/s")
    assert "ETA" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0s"), (9.96, "10s"), (59.6, "1m00s"), (3599.7, "1h00m"), (7500, "2h05m")],
)
def test_durations_are_short(seconds, text):
    stream = io.StringIO()
    line = shown(LineDisplay(stream), stream, scalars={}, eta_s=seconds)
    assert f"ETA {text}  " in line


def test_a_terminal_gets_a_bar_and_its_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    display = make_display(stream)
    assert isinstance(display, TerminalDisplay)
    text = shown(display, stream, scalars={"loss": 0.31})
    assert "step 100/1000" in text
    assert "loss 0.31  812 examples/s  9.4 steps/s  ETA 1m36s" in text
    assert "━" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_no_color_takes_the_colours_from_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = terminal_text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38;" in coloured
    assert "\x1b[38;" not in terminal_text()


def terminal_text():
    stream = Terminal()
    return shown(make_display(stream), stream, scalars={"loss": 0.31})


def test_a_note_is_a_line_that_stays(monkeypatch):
    stream = io.StringIO()
    LineDisplay(stream).note("compiled in 3.2 s · 1.4 GFLOP/step")
    assert stream.getvalue() == "compiled in 3.2 s · 1.4 GFLOP/step\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    display = make_display(terminal)
    display.show(numbers(step=1), {})
    display.note("[3] compiled")
    text = shown(display, terminal, scalars={})
    assert "[3] compiled\n" in text
    assert text.index("step 1/1000") < text.index("[3]") < text.index("step 100/1000")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "dumb"])
def test_what_is_no_terminal_or_a_dumb_one_gets_lines(stream, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(stream), LineDisplay)


def test_a_terminal_has_one_bar_at_a_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    first, second = make_display(Terminal()), make_display(Terminal())
    assert isinstance(first, TerminalDisplay)
    assert isinstance(second, LineDisplay)
    first.close()
    third = make_display(Terminal())
    assert isinstance(third, TerminalDisplay)
    third.close()


def test_importing_displays_does_not_import_rich():
    code = "import sys, replicator.hooks; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


_LOGS = """
import logging, sys
from replicator.monitoring.display import make_display
from tests.monitoring.test_display import numbers
if sys.argv[1] == "absl":
    from absl import flags, logging as absl_logging
    flags.FLAGS(sys.argv[:1])
    absl_logging.use_absl_handler()
else:
    logging.basicConfig(stream=getattr(sys, sys.argv[1]))
    logging.getLogger("another").addHandler(logging.root.handlers[0])
display = make_display()
for step in (1, 2):
    display.show(numbers(step=step), {"loss": 1.0})
    logging.warning("told %d", step)
    print("printed", step)
display.close()
logging.warning("told %d", 3)
"""


@pytest.mark.parametrize("to", ["stderr", "stdout", "absl"])
def test_what_is_logged_beside_the_bar_stands_on_lines_of_its_own(to):
    lines = on_a_terminal([sys.executable, "-c", _LOGS, to])
    for told in ("told 1", "told 2", "told 3"):
        (line,) = [line for line in lines if told in line]
        assert "loss" not in line
    assert [line for line in lines if line.startswith("printed")] == [
        "printed 1",
        "printed 2",
    ]
    assert [line.split()[1] for line in lines if "loss" in line] == ["2/1000"]


def test_what_is_printed_to_a_file_beside_the_bar_goes_there(tmp_path):
    out = tmp_path / "out"
    command = f'"{sys.executable}" -c "$0" stderr > "{out}"'
    lines = on_a_terminal(["sh", "-c", command, _LOGS])
    assert out.read_text() == "printed 1\nprinted 2\n"
    assert not [line for line in lines if "printed" in line]


def on_a_terminal(command):
    """Run a command on a pseudo-terminal; return the lines that it leaves there."""
    here, there = os.openpty()
    process = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=os.environ | WIDE
    )
    os.close(there)
    written = bytearray()
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(here, 65536):
            written += part
    os.close(here)
    assert process.wait(60) == 0
    return screen(written.decode())


WIDE = {"TERM": "xterm", "COLUMNS": "100"}


def screen(written):
    """Return the lines of a terminal, in which a bar is one line that is redrawn."""
    lines, column = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", written):
        if piece == "\n":
            lines.append("")
        elif piece == "\r":
            column = 0
        elif piece == "\x1b[2K":
            lines[-1] = ""
        elif not piece.startswith("\x1b"):
            lines[-1] = (
                lines[-1][:column].ljust(column) + piece + lines[-1][column + 1 :]
            )
            column += 1
    return lines
