"""What workers tell their launcher, as bytes and back."""

import numpy as np
import pytest

from replicator.errors import DecodeError, RemoteError
from replicator.launchpad_bridge.launchers.worker_reports import (
    ASK_PROGRAM_TO_STOP,
    ReportFrameReader,
    pack_error,
    pack_result,
    read_report,
    rebuild_error,
)
from replicator.launchpad_bridge.running.results import Unsendable


def read(*frames):
    return [read_report(frame) for frame in ReportFrameReader().feed(b"".join(frames))]


def test_results_arrive_as_they_were():
    array = np.arange(10_000.0).reshape(100, 100)
    [report] = read(pack_result({"a": array, "b": (1, "x")}, "returned"))
    assert report.kind == "returned"
    np.testing.assert_array_equal(report.result["a"], array)
    assert report.result["b"] == (1, "x")


@pytest.mark.parametrize("end", ["returned", "stopped", "preempted"])
def test_a_result_comes_with_how_its_worker_ended(end):
    [report] = read(pack_result(None, end))
    assert (report.kind, report.result) == (end, None)


def test_a_result_that_cannot_travel_is_told_with_the_reason():
    [report] = read(pack_result({"f": len}, "returned"))
    assert isinstance(report.result, Unsendable)
    assert "builtin_function" in report.result.reason


def test_frames_may_arrive_in_pieces():
    frames = ASK_PROGRAM_TO_STOP + pack_result([1, 2], "returned")
    reader = ReportFrameReader()
    found = [frame for byte in frames for frame in reader.feed(bytes([byte]))]
    assert [frame.asks for frame in found] == ["run", None]
    assert read_report(found[1]).result == [1, 2]


def raised():
    try:
        raise KeyError("missing") from ValueError("the cause")
    except KeyError as error:
        error.add_note("a note")
        return error


def test_errors_arrive_with_type_traceback_cause_and_notes():
    [frame] = ReportFrameReader().feed(pack_error(raised(), log_bytes=7))
    assert (frame.raised, frame.log_bytes) == (True, 7)
    report = read_report(frame)
    assert (report.kind, report.notes) == ("raised", ("a note",))
    error = rebuild_error(report.error, worker="a/1", where="process 5")
    assert isinstance(error, RemoteError)
    assert isinstance(error, KeyError)
    assert "the cause" in error.remote_traceback
    assert "a/1" in str(error)


class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_errors_that_cannot_be_shown_are_told_all_the_same():
    [report] = read(pack_error(Odd(print), log_bytes=0))
    assert report.error.type_names[0] == "Odd"


def test_a_huge_message_is_cut():
    [report] = read(pack_error(ValueError("x" * 10**7), log_bytes=0))
    assert len(report.error.text) < 20_000


def frame(kind, head, claimed=None):
    length = len(head) if claimed is None else claimed
    return kind + bytes(8) + length.to_bytes(8, "big") + bytes(8) + head


@pytest.mark.parametrize(
    "data",
    [
        frame(b"r", b"", claimed=2**62),
        frame(b"r", b"\xc1"),
        frame(b"?", b"\xc0"),
        frame(b"e", b"\xc0"),
        frame(b"r", b"\xc0"),
    ],
)
def test_what_is_no_report_is_refused(data):
    with pytest.raises(DecodeError):
        read(data)
