"""What a run hears of a worker's end."""

import os
import signal

import pytest

from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.exit_status import describe_status
from replicator.launchpad_bridge.launchers.worker_reports import (
    ReportReader,
    pack_error,
    pack_result,
)

KILLED = {"status": signal.SIGKILL, "is_killed": False, "out_of_memory": False}
WELL = {"status": 0, "is_killed": False, "out_of_memory": False}


def end(tmp_path, heard, said=None, *, lines="one\ntwo\n", attempt=0):
    log = tmp_path / "a.log"
    log.write_text(lines)
    reports = ReportReader().feed(said) if said else [None]
    return worker_end.exited(
        "a",
        attempt,
        said=reports[0],
        heard={**heard, "pid": 5},
        log=log,
        log_start=0,
    )


def first_line(exited):
    return str(exited.error).splitlines()[0]


def test_a_result_and_a_good_end_are_a_return(tmp_path):
    exited = end(tmp_path, WELL, pack_result(3, stopped=False))
    assert (exited.outcome, exited.result) == ("returned", 3)


def test_a_kill_after_the_result_takes_nothing_away(tmp_path):
    heard = {**KILLED, "is_killed": True}
    exited = end(tmp_path, heard, pack_result(3, stopped=True))
    assert (exited.outcome, exited.result) == ("stopped", 3)


def test_a_death_after_the_result_is_told(tmp_path):
    exited = end(tmp_path, KILLED, pack_result(3, stopped=False))
    assert exited.outcome == "died"
    assert "`a` returned, but then was killed by SIGKILL" in first_line(exited)


def test_a_death_has_its_last_lines_and_says_where_all_are(tmp_path):
    lines = str(end(tmp_path, KILLED).error).splitlines()
    assert lines[0] == "`a` was killed by SIGKILL, not by its launcher (process 5)"
    assert str(tmp_path / "a.log") in lines[1]
    assert lines[2:] == ["    one", "    two"]


def test_who_printed_nothing_has_no_last_lines(tmp_path):
    text = str(end(tmp_path, KILLED, lines="").error)
    assert "It printed nothing" in text


def test_a_raise_shows_lines_from_before_its_traceback(tmp_path):
    said = pack_error(ValueError("a bug"), log_bytes=4)
    exited = end(tmp_path, {**WELL, "status": 256}, said, attempt=2)
    assert first_line(exited) == "`a` raised ValueError: a bug (process 5, attempt 2)"
    assert str(exited.error).splitlines()[2:] == ["    one"]
    assert isinstance(exited.error.__cause__, ValueError)


def test_a_long_message_keeps_its_first_line_first(tmp_path):
    said = pack_error(ValueError("one\ntwo"), log_bytes=0)
    exited = end(tmp_path, WELL, said)
    assert str(exited.error).splitlines()[:2] == [
        "`a` raised ValueError: one (process 5)",
        "two",
    ]


def test_a_reason_stands_where_nobody_knows_more(tmp_path):
    assert first_line(end(tmp_path, {"reason": "is lost"})) == "`a` is lost (process 5)"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with code 0"),
        (3 << 8, "exited with code 3"),
        (signal.SIGSEGV, "was killed by SIGSEGV"),
        (signal.SIGKILL, "was killed by SIGKILL, not by its launcher"),
        (64, "was killed by SIGRTMAX"),
        (50, "was killed by signal 50"),
    ],
)
def test_a_status_is_described(status, words):
    assert describe_status(status) == words


def test_a_kill_for_memory_is_called_so():
    assert "out of memory" in describe_status(signal.SIGKILL, out_of_memory=True)
    assert "out of memory" not in describe_status(signal.SIGSEGV, out_of_memory=True)


def test_a_silent_exit_is_told_as_one(tmp_path):
    heard = {**KILLED, "status": os.EX_OK}
    assert "exited with code 0 without a word" in first_line(end(tmp_path, heard))
