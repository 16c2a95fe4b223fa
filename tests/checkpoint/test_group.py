"""One process alone, and rows that came from others (groups: tests/multiprocess)."""

import zlib

import numpy as np
import pytest

from replicator.checkpoint.group import Group, Rows, fill_in
from replicator.errors import CheckpointError


def rows(path, array, *, first, crc32=None):
    data = array.tobytes()
    path.write_bytes(data)
    return Rows(
        leaf=0,
        first=first,
        path=path,
        crc32=zlib.crc32(data) if crc32 is None else crc32,
    )


def test_rows_of_others_are_put_in_their_place(tmp_path):
    whole = np.arange(8, dtype=np.float32).reshape(4, 2)
    arrays = [np.zeros_like(whole)]
    arrays[0][:1] = whole[:1]
    others = (
        rows(tmp_path / "b", whole[3:], first=3),
        rows(tmp_path / "a", whole[1:3], first=1),
    )
    fill_in(arrays, others)
    np.testing.assert_array_equal(arrays[0], whole)


def test_rows_that_are_not_what_was_written_are_refused(tmp_path):
    own = np.ones((1, 2), np.float32)
    with pytest.raises(CheckpointError, match="must be what another process wrote"):
        fill_in([np.zeros((2, 2))], (rows(tmp_path / "a", own, first=1, crc32=1),))


def test_a_process_alone_tells_and_asks_nobody():
    group = Group(together=False, timeout_s=1.0)
    assert group.tell("anything", 5) == [5]
    assert group.lead("anything", lambda: [7]) == [7]


def test_what_goes_wrong_in_a_process_alone_is_raised_as_it_is():
    group = Group(together=None, timeout_s=1.0)
    with pytest.raises(OSError, match="full"):
        group.require_all("anything", OSError("full"))
