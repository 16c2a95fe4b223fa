import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.base.host.json_lines import append_line, parse_lines, read_lines


def append(path, value):
    with open(path, "a+b", buffering=0) as file:
        append_line(file, value)


def test_lines_come_back_in_order(tmp_path):
    path = tmp_path / "lines.jsonl"
    for value in ({"step": 1}, [2, 0.5]):
        append(path, value)
    assert read_lines(path) == [{"step": 1}, [2, 0.5]]


def test_a_torn_line_swallows_nothing(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    append(path, {"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n{"st\n{"step": 2}\n'
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_an_absent_file_has_no_lines(tmp_path):
    assert read_lines(tmp_path / "none.jsonl") == []


def test_empty_lines_are_left_out():
    assert parse_lines(b"\n1\n\n2") == [1, 2]


def test_lines_of_threads_do_not_mix(tmp_path):
    path, start = tmp_path / "lines.jsonl", threading.Barrier(4)

    def write(thread):
        start.wait(60)
        for number in range(50):
            append(path, [thread, number])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert sorted(read_lines(path)) == [[t, n] for t in range(4) for n in range(50)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_raises():
    with pytest.raises(OSError, match="No space left"):
        append("/dev/full", 1)
