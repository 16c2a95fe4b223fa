"""The journal: whole lines whatever happens, from many threads and processes."""

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicator.errors import ArgumentError
from replicator.monitoring.events import EventLog, read_events
from tests.fakes import FakeClock


def kinds(folder):
    return [event["kind"] for event in read_events(folder)]


def test_an_event_says_what_when_who_and_since_when(tmp_path):
    clock = FakeClock(now_s=100.0)
    log = EventLog(tmp_path / "new" / "run", process=0, clock=clock)
    clock.advance(2.5)
    log.write("saved", step=400, name="step-400", of=None)
    [event] = read_events(tmp_path / "new" / "run")
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "kind": "saved",
        "process": 0,
        "session": log.session,
        "uptime_s": 2.5,
        "step": 400,
        "name": "step-400",
    }


def test_an_event_is_there_as_soon_as_it_is_written(tmp_path):
    log = EventLog(tmp_path)
    log.write("started", step=0)
    assert kinds(tmp_path) == ["started"]  # nobody closed anything


def test_a_second_session_appends(tmp_path):
    for kind in ("started", "resumed"):
        log = EventLog(tmp_path)
        log.write(kind)
    first, second = read_events(tmp_path)
    assert (first["kind"], second["kind"]) == ("started", "resumed")
    assert first["session"] != second["session"]


@pytest.mark.parametrize("torn", ['{"time": "2026-11', "{", '{"step": 3}', "[]", "7"])
def test_a_torn_line_is_skipped_and_swallows_nothing(tmp_path, torn):
    log = EventLog(tmp_path)
    log.write("started")
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write(torn)
    assert kinds(tmp_path) == ["started"]
    EventLog(tmp_path).write("resumed")
    assert kinds(tmp_path) == ["started", "resumed"]


def test_processes_write_files_of_their_own_that_are_read_as_one(tmp_path):
    logs = [EventLog(tmp_path, process=process) for process in (0, 1, 11)]
    for _ in range(2):
        for log in logs:
            log.write("saved")
    assert [event["process"] for event in read_events(tmp_path)] == [0, 1, 11] * 2
    assert len(list(tmp_path.iterdir())) == 3


def test_no_directory_and_no_journal_are_no_events(tmp_path):
    assert read_events(tmp_path / "nothing") == read_events(tmp_path) == []


def test_lines_of_many_threads_stay_whole(tmp_path):
    log, start = EventLog(tmp_path), threading.Barrier(8)

    def write(thread):
        start.wait(60)
        for number in range(50):
            log.write("spike", step=number, thread=thread, text="x" * 200)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    events = read_events(tmp_path)
    assert len(events) == 400
    for thread in range(8):
        steps = [event["step"] for event in events if event["thread"] == thread]
        assert steps == list(range(50))


def test_numbers_that_json_lacks_and_objects_are_still_strict_json(tmp_path):
    EventLog(tmp_path).write("skipped", loss=float("nan"), path=Path("/x"))

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=refuse)
    assert (row["loss"], row["path"]) == ("NaN", "PosixPath('/x')")


def test_a_field_must_not_use_a_name_of_the_journal(tmp_path):
    with pytest.raises(ArgumentError, match=r"`fields` must not use .* got `time`"):
        EventLog(tmp_path).write("saved", time=3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_warning_with_the_event_in_it(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        EventLog(tmp_path).write("saved", step=7)
    [record] = caplog.records
    assert "'step': 7" in record.getMessage()
    assert "No space left" in record.getMessage()
