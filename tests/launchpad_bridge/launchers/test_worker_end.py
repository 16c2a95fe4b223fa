"""What a run hears of a worker's end."""

import signal
import traceback

from replicator.launchpad_bridge.launchers import worker_end
from replicator.launchpad_bridge.launchers.worker_reports import (
    ReportFrameReader,
    pack_error,
    pack_result,
)

KILLED = {"code": -signal.SIGKILL}
WELL = {"code": 0}


def end(how, report=None, *, lines=("one", "two"), attempt=0, log="/logs/a.log"):
    return worker_end.exited(
        "a",
        attempt,
        last=ReportFrameReader().feed(report)[0] if report else None,
        end=worker_end.ProcessExit(**how, pid=5, lines=lines, log=log),
    )


def first_line(exited):
    return str(exited.error).splitlines()[0]


def test_a_result_and_a_good_end_are_a_return():
    exited = end(WELL, pack_result(3, "returned"))
    assert (exited.outcome, exited.result) == ("returned", 3)


def test_a_kill_after_the_result_takes_nothing_away():
    exited = end({**KILLED, "is_killed": True}, pack_result(3, "stopped"))
    assert (exited.outcome, exited.result) == ("stopped", 3)


def test_who_stopped_for_a_signal_of_its_own_is_preempted_with_its_result():
    exited = end(WELL, pack_result(3, "preempted"))
    assert (exited.outcome, exited.result) == ("preempted", 3)
    assert "`a` was preempted: it got SIGTERM, not from its launcher" in first_line(
        exited
    )


def test_a_death_after_the_result_is_told():
    exited = end(KILLED, pack_result(3, "returned"))
    assert exited.outcome == "died"
    assert "`a` returned, but then was killed by SIGKILL" in first_line(exited)


def test_a_death_has_its_last_lines_and_says_where_all_are():
    lines = str(end(KILLED).error).splitlines()
    assert lines[0] == "`a` was killed by SIGKILL, not by its launcher (process 5)"
    assert "/logs/a.log" in lines[1]
    assert lines[2:] == ["    one", "    two"]


def test_who_printed_nothing_has_no_last_lines():
    text = str(end(KILLED, lines=()).error)
    assert "It printed nothing" in text


def test_a_raise_is_told_with_its_type_and_attempt():
    report = pack_error(ValueError("a bug"), log_bytes=4)
    exited = end({"code": 1}, report, attempt=2)
    assert first_line(exited) == "`a` raised ValueError: a bug (process 5, attempt 2)"
    assert isinstance(exited.error.__cause__, ValueError)


def test_a_long_message_keeps_its_first_line_first():
    exited = end(WELL, pack_error(ValueError("one\ntwo"), log_bytes=0))
    assert str(exited.error).splitlines()[:2] == [
        "`a` raised ValueError: one (process 5)",
        "two",
    ]


def test_a_reason_stands_where_nobody_knows_more():
    assert first_line(end({"reason": "is lost"})) == "`a` is lost (process 5)"
    assert str(end({"reason": "is lost"}, log="").error) == "`a` is lost"


def test_a_report_that_is_none_is_a_death():
    exited = end(WELL, b"r" + bytes(8) + (1).to_bytes(8, "big") + bytes(8) + b"\xc0")
    assert exited.outcome == "died"
    assert "sent what is no report" in first_line(exited)


def test_a_silent_exit_is_told_as_one():
    assert "exited with code 0 without a report" in first_line(end(WELL))


def test_what_a_worker_printed_or_raised_is_no_command_to_a_terminal():
    error = ValueError("\x1b[2J")
    error.add_note("\x1b[8m")
    for exited in (
        end(KILLED, lines=["\x1b[2J"]),
        end(WELL, pack_error(error, log_bytes=0)),
    ):
        shown = "".join(traceback.format_exception(exited.error))
        assert "\\x1b[2J" in shown
        assert "\x1b" not in shown
