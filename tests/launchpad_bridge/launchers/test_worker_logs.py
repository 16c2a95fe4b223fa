"""Files for the output of workers, and what is quoted of them."""

import os

import pytest

from replicator.errors import LaunchError
from replicator.launchpad_bridge.launchers.worker_logs import (
    begin_attempt,
    last_lines,
    log_paths,
)


def test_each_worker_has_a_file_with_its_name(tmp_path):
    paths = log_paths(tmp_path, ["learner", "actor/2"])
    assert [path.name for path in paths.values()] == ["learner.log", "actor-2.log"]


def test_names_that_look_alike_have_files_of_their_own(tmp_path):
    names = ["actor/2", "actor-2", "Actor 2", "..", "ä", "x" * 300]
    paths = log_paths(tmp_path, names)
    assert len({path.name.lower() for path in paths.values()}) == len(names)
    assert all(path.parent == tmp_path for path in paths.values())
    assert max(len(path.name) for path in paths.values()) < 120


def test_a_log_is_private(tmp_path):
    begin_attempt(tmp_path / "a.log", 0)
    assert (tmp_path / "a.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_what_a_link_leads_to_is_not_written_to(tmp_path, link):
    (tmp_path / "diary").write_text("dear")
    link(tmp_path / "diary", tmp_path / "a.log")
    with pytest.raises(LaunchError):
        begin_attempt(tmp_path / "a.log", 1)
    assert (tmp_path / "diary").read_text() == "dear"


def test_a_pipe_in_the_place_of_a_log_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "a.log")
    with pytest.raises(LaunchError):
        begin_attempt(tmp_path / "a.log", 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_written_to(tmp_path):
    (tmp_path / "a.log").touch()
    os.chown(tmp_path / "a.log", 65534, 65534)
    with pytest.raises(LaunchError, match="files of this user's only"):
        begin_attempt(tmp_path / "a.log", 0)


def test_an_attempt_begins_where_the_one_before_ended(tmp_path):
    log = tmp_path / "a.log"
    assert begin_attempt(log, 0) == 0
    log.write_bytes(b"one\n")
    start = begin_attempt(log, 1)
    assert log.read_bytes() == b"one\n--- attempt 1\n"
    assert last_lines(log, start) == []


def test_the_last_lines_of_a_part_are_returned(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(f"{number}\n" for number in range(1000)))
    assert last_lines(log, 0)[-1] == "999"
    assert len(last_lines(log, 0)) == 40
    assert last_lines(log, 2, 6) == ["1", "2"]


def test_bytes_that_are_no_text_are_shown_all_the_same(tmp_path):
    (tmp_path / "a.log").write_bytes(b"\xff\xfe\n")
    assert last_lines(tmp_path / "a.log", 0) == ["\\xff\\xfe"]


def test_a_log_that_is_not_there_has_no_lines(tmp_path):
    assert last_lines(tmp_path / "a.log", 0) == []
