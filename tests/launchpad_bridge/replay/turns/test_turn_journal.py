"""The journal leads back to each batch, wherever its writer was killed."""

import errno
import io
import shutil

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.errors import (
    ArgumentError,
    CheckpointInUseError,
    CheckpointMismatchError,
)
from replicator.launchpad_bridge.replay.turns import turn_journal
from replicator.launchpad_bridge.replay.turns.journaled_draws import JournaledDraws
from replicator.launchpad_bridge.replay.turns.sample_order import SampleOrder
from replicator.launchpad_bridge.replay.turns.turn_journal import TurnJournal
from replicator.launchpad_bridge.trajectories.table import Cut, TableRestartedError

CAPACITY, SIZE, NEW, LAG = 6, 4, 2, 2
ORDER = SampleOrder(
    actors=["a"],
    batch_size=SIZE,
    new_rows_per_batch=NEW,
    rows_per_turn=1,
    lag=0,
    capacity=CAPACITY,
    min_size=4,
    sampler=lp.prioritised(0.7),
    priority_lag=LAG,
    seed=1,
)
BATCHES = 12


@pytest.fixture
def open_in():
    """Return a function that opens a journal, in place of the one before."""
    last = []

    def open_next(folder, **options):
        close()
        last.append(
            TurnJournal(folder, capacity=CAPACITY, **{"keep_batches": 99} | options)
        )
        return JournaledDraws(ORDER, last[-1])

    def close():
        for journal in last:
            journal.close()

    yield open_next
    close()


def values_of(batch):
    return np.arange(SIZE) + batch % 3 + 0.5


def new_rows(number):
    ids = NEW * number + np.arange(NEW)
    return {"id": ids, "reward": np.float32(ids)[:, None], "core": ()}


def step(rows):
    """Make the next batch, with all that comes before it; return it, as bytes."""
    for batch in range(max(rows.draws.batch - LAG, 0), rows.draws.batch):
        keys = batch * SIZE + np.arange(SIZE)
        rows.draws.receive(keys, values_of(batch))
    while rows.batches_in < ORDER.first_batches + rows.draws.batch:
        rows.append(new_rows(rows.batches_in))
    found, sample = rows.draw()
    np.testing.assert_array_equal(found["id"], sample.serials)
    return found["id"].tobytes() + sample.probabilities.tobytes()


def cut_at(batch, rows=None):
    made_by = None if rows is None else {"journal": rows.journal_id}
    order = made_by and {**ORDER.to_json(), **made_by}
    return Cut(batch=batch, snapshots={"a": None}, order=order)


@pytest.fixture
def written(tmp_path, open_in):
    """Return a folder with all batches, and these."""
    rows = open_in(tmp_path / "journal")
    rows.begin_anew()
    batches = [step(rows) for _ in range(BATCHES)]
    return tmp_path / "journal", batches


def short_files(monkeypatch):
    monkeypatch.setattr(turn_journal, "_FILE_BYTES", 1)
    monkeypatch.setattr(turn_journal, "_BASES", 2)


def test_each_batch_can_be_gone_back_to_and_is_followed_by_the_same(
    tmp_path, written, open_in
):
    folder, batches = written
    for at in range(1, BATCHES + 1):
        copy = tmp_path / f"at {at}"
        shutil.copytree(folder, copy)
        rows = open_in(copy)
        rows.go_back(cut_at(at))
        assert [step(rows) for _ in range(at, BATCHES)] == batches[at:]


def test_the_same_holds_over_many_files_of_which_old_ones_go(
    tmp_path, monkeypatch, open_in
):
    short_files(monkeypatch)
    rows = open_in(tmp_path / "journal", keep_batches=4)
    rows.begin_anew()
    batches = [step(rows) for _ in range(40)]
    names = sorted(path.name for path in (tmp_path / "journal").glob("turns-*"))
    assert 2 < len(names) < 15
    for at in range(40, 35, -1):
        rows = open_in(tmp_path / "journal", keep_batches=4)
        rows.go_back(cut_at(at))
    assert [step(rows) for _ in range(36, 40)] == batches[36:]


def test_a_file_is_durable_before_the_next_one_is_begun(tmp_path, monkeypatch, open_in):
    short_files(monkeypatch)
    rows, folder = open_in(tmp_path / "journal"), tmp_path / "journal"
    calls = []

    def announce(operation, path):
        calls.append((operation, path.name, len(list(folder.glob("turns-*")))))

    rows._journal._disk.announce = announce
    rows.begin_anew()
    for _ in range(12):
        step(rows)
    names = sorted(path.name for path in folder.glob("turns-*"))
    assert len(names) > 2
    for place, name in enumerate(names[:-1], 1):
        at = calls.index(("sync_file", name, place))
        assert calls[at + 1] == ("sync_directory", "journal", place)


def test_what_a_power_cut_lost_is_refused_with_the_batch_it_ends_at(written, open_in):
    [path] = written[0].glob("turns-*")
    content = path.read_bytes()
    path.write_bytes(content[:-50].ljust(len(content), b"\0"))  # names, not content
    rows = open_in(written[0])
    with pytest.raises(ArgumentError, match=r"got batch 12 .* ends at batch 11"):
        rows.go_back(cut_at(12))
    rows.go_back(cut_at(11))


def test_a_file_before_the_last_that_lacks_rows_is_refused(
    tmp_path, monkeypatch, open_in
):
    short_files(monkeypatch)
    rows, folder = open_in(tmp_path / "journal"), tmp_path / "journal"
    rows.begin_anew()
    for _ in range(40):
        step(rows)
    *_, path, _ = sorted(folder.glob("turns-*"))
    content = path.read_bytes()
    path.write_bytes(content[:-300])
    rows = open_in(folder)
    with pytest.raises(ArgumentError, match="which has not all its rows"):
        rows.go_back(cut_at(40))
    path.write_bytes(content)
    rows.go_back(cut_at(40))


def test_a_batch_that_is_not_there_any_more_is_refused(tmp_path, monkeypatch, open_in):
    short_files(monkeypatch)
    rows = open_in(tmp_path / "journal", keep_batches=4)
    rows.begin_anew()
    for _ in range(40):
        step(rows)
    with pytest.raises(ArgumentError, match="got batch 3 for"):
        rows.go_back(cut_at(3))


def test_cut_off_within_its_last_parts_it_has_the_batches_before(
    tmp_path, written, open_in
):
    folder, batches = written
    [path] = folder.glob("turns-*")
    content = path.read_bytes()
    ends = [end for part, end in turn_journal._parts(path) if "draw" in part]
    for size in range(ends[-2], len(content), 9):
        path.write_bytes(content[:size])
        rows = open_in(folder)
        with pytest.raises(ArgumentError, match="got batch 12 for"):
            rows.go_back(cut_at(12))
        rows.go_back(cut_at(11))
        assert path.stat().st_size == ends[-2]
    rows = open_in(folder)
    rows.go_back(cut_at(11))
    assert step(rows) == batches[11]


def test_a_byte_that_changed_ends_it(written, open_in):
    folder, _ = written
    [path] = folder.glob("turns-*")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    rows = open_in(folder)
    with pytest.raises(ArgumentError, match="got batch 12 for"):
        rows.go_back(cut_at(12))


def test_what_came_after_is_dropped(written, open_in):
    folder, batches = written
    rows = open_in(folder)
    rows.go_back(cut_at(5))
    assert step(rows) == batches[5]
    with pytest.raises(ArgumentError, match="got batch 12 for"):
        rows.go_back(cut_at(12))


def test_after_a_write_that_failed_it_goes_on_from_the_disk(
    written, monkeypatch, open_in
):
    folder, batches = written
    rows = open_in(folder)
    rows.go_back(cut_at(5))
    with monkeypatch.context() as patch:
        patch.setattr(TurnJournal, "write", half_written)
        with pytest.raises(OSError, match="no room"):
            step(rows)
    with pytest.raises(TableRestartedError, match="after a write that failed"):
        step(rows)
    rows.go_back(cut_at(5))  # whose file cannot be closed without room, either
    assert [step(rows) for _ in range(5, BATCHES)] == batches[5:]


class FullDisk(io.RawIOBase):
    """A file that no byte can be written to."""

    def writable(self):
        return True

    def write(self, data):
        raise OSError(errno.ENOSPC, "no room")


def half_written(journal, part):
    with journal._open as file:
        file.write(b"half")
    journal._open = io.BufferedWriter(FullDisk())
    journal._open.write(b"more")
    journal._open.flush()


def test_a_cut_of_another_run_is_refused(written, tmp_path, open_in):
    cut = cut_at(5, open_in(tmp_path / "other"))
    rows = open_in(written[0])
    with pytest.raises(ArgumentError, match="must be of the run in `checkpoint_dir`"):
        rows.go_back(cut)


def test_a_run_that_begins_anew_has_nothing_of_the_one_before(written, open_in):
    folder, batches = written
    rows = open_in(folder)
    rows.begin_anew()
    assert not list(folder.glob("turns-*"))
    assert [step(rows) for _ in range(BATCHES)] == batches


def test_a_second_writer_and_other_files_are_refused(tmp_path, open_in):
    open_in(tmp_path / "journal")
    with pytest.raises(CheckpointInUseError):
        TurnJournal(tmp_path / "journal", capacity=CAPACITY, keep_batches=9)
    (tmp_path / "other").mkdir()
    for name in (".hidden", "notes"):
        (tmp_path / "other" / name).touch()
    with pytest.raises(CheckpointMismatchError, match="with notes"):
        open_in(tmp_path / "other")


@pytest.mark.parametrize("name", ["turns-1-2", "turns-mine.csv", "turns-a-b-c"])
def test_files_whose_names_are_like_those_of_a_journal_are_refused(name, written):
    (written[0] / name).touch()
    with pytest.raises(CheckpointMismatchError, match=f"with {name}"):
        TurnJournal(written[0], capacity=CAPACITY, keep_batches=9)
    assert (written[0] / name).exists()


def test_a_file_that_came_later_is_left_alone(written, open_in):
    rows = open_in(written[0])
    (written[0] / "turns-1-2").touch()
    rows.begin_anew()
    assert [path.name for path in written[0].glob("turns-*")] == ["turns-1-2"]
