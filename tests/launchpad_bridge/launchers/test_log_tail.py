"""What is shown of logs as they grow."""

import io

import pytest

from replicator.launchpad_bridge.launchers.log_tail import LogTail, uses_colours


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(folder, texts, *, terminal=None):
    """Return what is shown of logs that are written after the tail has begun."""
    terminal = terminal or io.StringIO()
    tail = LogTail({name: folder / name for name in texts}, terminal=terminal)
    tail.start()
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    tail.close()
    return terminal.getvalue()


def test_lines_have_the_name_of_their_worker(tmp_path):
    text = shown(tmp_path, {"a": b"1\n2\n", "long": b"3\n"})
    assert sorted(text.splitlines()) == ["a    | 1", "a    | 2", "long | 3"]


def test_a_line_without_an_end_is_shown_at_the_end(tmp_path):
    assert shown(tmp_path, {"a": b"1\n2"}) == "a | 1\na | 2\n"


def test_colours_are_for_terminals(tmp_path):
    text = shown(tmp_path, {"a": b"1\n"}, terminal=Terminal())
    assert text == "\x1b[36ma | \x1b[0m1\n"


@pytest.mark.parametrize(
    ("terminal", "environ", "expected"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (io.StringIO(), {}, False),
    ],
)
def test_no_color_is_obeyed(terminal, environ, expected):
    assert uses_colours(terminal, environ) is expected


def test_what_a_run_before_has_left_is_not_shown(tmp_path):
    (tmp_path / "a").write_bytes(b"old\n")
    terminal = io.StringIO()
    tail = LogTail({"a": tmp_path / "a"}, terminal=terminal)
    tail.start()
    with (tmp_path / "a").open("ab") as log:
        log.write(b"new\n")
    tail.close()
    assert terminal.getvalue() == "a | new\n"


def test_a_flood_is_cut_and_that_is_said(tmp_path):
    line = b"x" * 99 + b"\n"
    text = shown(tmp_path, {"a": line * 100_000})
    assert "bytes are only in" in text
    assert len(text) < 5_000_000


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path):
    assert shown(tmp_path, {"a": b"\xff\n"}) == "a | \\xff\n"


def test_a_closed_terminal_ends_the_showing_and_nothing_else(tmp_path):
    terminal = io.StringIO()
    terminal.close()
    tail = LogTail({"a": tmp_path / "a"}, terminal=terminal)
    tail.start()
    (tmp_path / "a").write_bytes(b"1\n")
    tail.close()


def test_a_log_that_never_comes_is_no_problem(tmp_path):
    tail = LogTail({"a": tmp_path / "a"}, terminal=io.StringIO())
    tail.start()
    tail.close()


def test_what_a_node_prints_is_no_command_to_the_terminal(tmp_path):
    text = shown(tmp_path, {"a": b"\x1b[2Jgone\rb | forged\xc2\x9b\n"})
    assert text == "a | \\x1b[2Jgone\\x0db | forged\\x9b\n"
