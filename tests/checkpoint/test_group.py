"""One process alone, and pieces that came from others (groups: tests/multiprocess)."""

import zlib

import numpy as np
import pytest

from replicator.checkpoint.group import Group, Piece, fill_in
from replicator.errors import CheckpointError


def piece(path, array, *, start, crc32=None):
    data = array.tobytes()
    path.write_bytes(b"before" + data + b"after")
    return Piece(
        leaf=0,
        start=start,
        shape=array.shape,
        path=path,
        offset=len(b"before"),
        crc32=zlib.crc32(data) if crc32 is None else crc32,
    )


def test_pieces_of_others_are_put_in_their_place(tmp_path):
    whole = np.arange(12, dtype=np.float32).reshape(4, 3)
    arrays = [np.zeros_like(whole)]
    arrays[0][:1] = whole[:1]
    others = (
        piece(tmp_path / "b", whole[3:], start=(3, 0)),
        piece(tmp_path / "a", whole[1:3, 2:], start=(1, 2)),
        piece(tmp_path / "c", whole[1:3, :2], start=(1, 0)),
    )
    fill_in(arrays, others)
    np.testing.assert_array_equal(arrays[0], whole)


def test_pieces_that_are_not_what_was_written_are_refused(tmp_path):
    own = np.ones((1, 2), np.float32)
    other = piece(tmp_path / "a", own, start=(1, 0), crc32=1)
    with pytest.raises(CheckpointError, match="must be what another process wrote"):
        fill_in([np.zeros((2, 2))], (other,))


def test_a_process_alone_tells_and_asks_nobody():
    group = Group(together=False, timeout_s=1.0)
    assert group.share("anything", 5) == [5]
    assert group.lead("anything", lambda: [7]) == [7]


def test_what_goes_wrong_in_a_process_alone_is_raised_as_it_is():
    group = Group(together=None, timeout_s=1.0)
    with pytest.raises(OSError, match="full"):
        group.require_all("anything", OSError("full"))
