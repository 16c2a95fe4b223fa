"""A table that is saved, and goes on from its last save."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

import replicator.launchpad_bridge as lp
from replicator.checkpoint.disk import Disk
from replicator.errors import (
    CheckpointError,
    CheckpointInUseError,
    CheckpointMismatchError,
)
from replicator.launchpad_bridge.replay import table_saves
from replicator.launchpad_bridge.trajectories.table import TrajectoryError
from tests.launchpad_bridge.replay.test_replay_table import draw, ids_of, insert, rows

NEVER_S = 1e6


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "replay"


def table_in(folder, capacity=64, **options):
    return lp.ReplayTable(
        capacity,
        **{"sampler": lp.prioritised(1)} | options,
        checkpoint_dir=folder,
        checkpoint_every_s=NEVER_S,
    )


def end(table):
    """Let another table have the directory, as the end of a process does."""
    table._saves.close()


def again(table, folder, **options):
    end(table)
    return table_in(folder, **options)


def held(table):
    """Return key and priority of each row, by its id."""
    slots = np.flatnonzero(table._rows.keys >= 0)
    if not len(slots):
        return {}
    found = table._copies.copy(slots)
    assert (found["reward"] == found["id"][:, None]).all()
    keys, priorities = table._rows.keys[slots], table._rows.priorities[slots]
    records = zip(keys.tolist(), priorities.tolist(), strict=True)
    return dict(zip(found["id"].tolist(), records, strict=True))


def test_rows_keys_priorities_and_counts_go_on(folder):
    table = table_in(folder)
    insert(table, *range(5), priorities=[1, 2, 3, 4, 5], version=3, episodes=[2.0])
    taken = draw(table, 64)
    table.update_priorities(taken.keys, 1.0 + ids_of(taken))
    before, counts = held(table), table.statistics()
    table.save()
    table = again(table, folder)
    after = table.statistics()
    same = ("inserted", "taken", "episodes", "updated", "late", "held", "dropped")
    assert [after[name] for name in same] == [counts[name] for name in same]
    assert held(table) == before
    assert set(draw(table, 9).versions.tolist()) == {3}


def test_a_table_that_goes_on_does_not_keep_the_files_it_read(folder):
    table = table_in(folder)
    insert(table, *range(5))
    table.save()
    [segment] = again(table, folder)._saves._full
    assert segment.keys.flags.owndata  # not a view of a whole file


def test_the_largest_priority_so_far_goes_on(folder):
    table = table_in(folder)
    insert(table, 1, priorities=[8])
    table.update_priorities(draw(table, 1).keys, [2.0])
    table.save()
    table = again(table, folder)
    insert(table, 2)
    assert held(table)[2][1] == 8


def test_keys_from_before_lead_to_their_rows_and_new_ones_are_new(folder):
    table = table_in(folder)
    insert(table, 1, 2, 3, priorities=[1, 1, 1])
    keys = held(table)
    table.save()
    table = again(table, folder, capacity=200)
    insert(table, 4, 5, priorities=[1, 1])
    found = held(table)
    assert len({key for key, _ in found.values()}) == 5
    table.update_priorities(np.array([keys[2][0], found[4][0]]), [0.0, 0.0])
    priorities = {number: priority for number, (_, priority) in held(table).items()}
    assert priorities == {1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    assert table.statistics()["late"] == 0


def test_a_late_update_of_a_row_before_the_restart_is_counted(folder):
    table = table_in(folder, capacity=4)
    insert(table, 1, 2)
    table.save()
    insert(table, 3, 4)  # lost
    keys = np.array([key for key, _ in held(table).values()])
    table = again(table, folder, capacity=4)
    insert(table, *range(10, 14))
    table.update_priorities(keys, np.zeros(4))
    assert table.statistics()["late"] == 4
    assert {priority for _, priority in held(table).values()} == {1}


def test_each_row_is_written_once_and_goes_with_its_segment(folder, monkeypatch):
    row_bytes = rows(0)["id"].nbytes + rows(0)["reward"].nbytes
    monkeypatch.setattr(table_saves, "_SEGMENT_BYTES", 8 * row_bytes)
    monkeypatch.setattr(table_saves, "_PIECE_BYTES", 3 * row_bytes)
    table, written = table_in(folder, capacity=32), []
    table._saves._disk = Disk(lambda operation, path: written.append((operation, path)))
    for first in range(0, 120, 6):
        insert(table, *range(first, first + 6))
        table.save()
        files = sorted(path.name for path in folder.glob("rows-*"))
        assert len(files) <= 32 / 8 + 2
    made = [
        path.name for op, path in written if op == "rename" and path.stem != "table"
    ]
    assert len(made) == len(set(made)) <= 120 // 8 + 20
    assert sorted(held(again(table, folder, capacity=32))) == list(range(88, 120))


def files_in(folder):
    return sorted(folder.glob("rows-*"))


def few_that_stay(table, times):
    """Save after each eight rows, of which one stays; return these, in order."""
    for first in range(0, 8 * times, 8):
        insert(table, *range(first, first + 8), priorities=[9, *[1] * 7])
        table.save()
    return list(range(0, 8 * times, 8))


@pytest.fixture
def short_segments(monkeypatch):
    row_bytes = rows(0)["id"].nbytes + rows(0)["reward"].nbytes
    monkeypatch.setattr(table_saves, "_SEGMENT_BYTES", 8 * row_bytes)


KEEPS = {"capacity": 20, "remover": "lowest", "sampler": lp.fifo()}


def test_files_hold_few_rows_that_went_whoever_goes(folder, short_segments):
    table = table_in(folder, **KEEPS)
    kept = few_that_stay(table, 12)
    saved = table._saves._full
    assert {each.name for each in saved} == {path.name for path in files_in(folder)}
    assert sum(len(each.keys) for each in saved) <= 4 * 20 + 8
    table = again(table, folder, **KEEPS, max_times_sampled=1)
    drawn = ids_of(draw(table, 20)).tolist()
    assert [each for each in drawn if each % 8 == 0] == kept  # in the order they came


def test_a_save_that_fails_as_it_writes_rows_anew_loses_none(folder, short_segments):
    table = table_in(folder / "0", **KEEPS)
    kept = few_that_stay(table, 11)
    end(table)
    for failing in itertools.count(1):
        place = shutil.copytree(folder / "0", folder / str(failing))
        table, numbers = table_in(place, **KEEPS), itertools.count(1)

        def announce(operation, path, failing=failing, numbers=numbers):
            if next(numbers) == failing:
                raise OSError("no room")

        table._saves._disk = Disk(announce)
        files = len(files_in(place))
        insert(table, *range(100, 108), priorities=[9] + [1] * 7)
        try:
            table.save()
        except OSError:
            assert set(kept) <= set(held(again(table, place, **KEEPS)))
            continue
        break
    assert len(files_in(place)) < files
    assert set(kept) <= set(held(again(table, place, **KEEPS)))


def test_a_row_that_went_before_the_save_is_not_there(folder):
    table = table_in(folder, capacity=4)
    insert(table, 1, 2, 3)
    table.save()
    insert(table, 4, 5, 6)
    table.save()
    table = again(table, folder, capacity=4)
    assert sorted(held(table)) == [3, 4, 5, 6]
    counts = table.statistics()
    assert counts["inserted"] == counts["held"] + counts["dropped"]["full"] == 6


def test_a_smaller_table_keeps_the_newest_rows(folder):
    table = table_in(folder)
    insert(table, *range(20))
    table.save()
    table = again(table, folder, capacity=6)
    assert sorted(held(table)) == list(range(14, 20))
    assert table.statistics()["dropped"]["full"] == 14


def test_under_another_limiter_neither_side_waits_for_ever(folder):
    table = table_in(folder)
    for first in range(0, 30, 3):
        insert(table, *range(first, first + 3))
    draw(table, 64)
    table.save()
    limiter = lp.RateLimiter(min_size=5, samples_per_insert=10, error=20)
    table = again(table, folder, limiter=limiter)
    for number in range(100, 130):
        insert(table, number)
        draw(table, 10)


def test_a_checkpoint_does_not_say_how_rows_are_drawn(folder):
    table = table_in(folder, sampler=lp.fifo())
    insert(table, 1, 2, priorities=[0.0, 2.0])
    table.save()
    table = again(table, folder, sampler=lp.prioritised(1.0))
    assert ids_of(draw(table, 4)).tolist() == [2, 2, 2, 2]


def test_restarts_under_another_limiter_let_no_more_rows_pass(folder):
    table = table_in(folder)
    insert(table, *range(30))
    table.save()
    limiter = lp.RateLimiter(min_size=5, samples_per_insert=1, error=4)
    for _ in range(3):
        table = again(table, folder, limiter=limiter)
        while table._limited.may_insert(1, held=table.statistics()["held"]):
            insert(table, 100)
        table.save()
    assert table.statistics()["inserted"] == 30 + 4


def test_how_often_a_row_was_drawn_goes_on(folder):
    table = table_in(folder, sampler=lp.fifo(), max_times_sampled=3)
    insert(table, 1, 2)
    draw(table, 2)
    table.save()
    table = again(table, folder, sampler=lp.fifo(), max_times_sampled=3)
    assert ids_of(draw(table, 4)).tolist() == [1, 2, 2, 2]


def test_a_save_that_fails_anywhere_leaves_one_that_is_whole(folder):
    for failing in itertools.count(1):
        place = folder / str(failing)
        table = table_in(place)
        insert(table, 1, 2)
        table.save()
        insert(table, 3)
        numbers = itertools.count(1)

        def announce(operation, path, failing=failing, numbers=numbers):
            if next(numbers) == failing:
                raise OSError("no room")

        table._saves._disk = Disk(announce)
        try:
            table.save()
        except OSError:
            assert sorted(held(again(table, place))) in ([1, 2], [1, 2, 3])
            continue
        break
    assert failing > 5
    assert sorted(held(again(table, place))) == [1, 2, 3]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("more", [[], [3]])
def test_after_a_save_that_failed_anywhere_the_next_one_has_all_rows(
    folder, number, more
):
    for failing in itertools.count(1):
        place = folder / str(failing)
        table, numbers = table_in(place), itertools.count(1)
        insert(table, 1)
        table.save()
        insert(table, 2)

        def announce(operation, path, failing=failing, numbers=numbers):
            if next(numbers) == failing:
                raise OSError(number, os.strerror(number))

        table._saves._disk = Disk(announce)
        try:
            table.save()
        except OSError:
            for each in more:
                insert(table, each)
            table.save()
            assert sorted(held(again(table, place))) == [1, 2, *more]
            assert not list(place.glob("*.draft"))
            continue
        break
    assert failing > 5


def test_saves_that_fail_again_and_again_leave_one_draft(folder):
    table = table_in(folder)
    insert(table, 1)

    def announce(operation, path):
        if operation == "sync_file":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table._saves._disk = Disk(announce)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            table.save()
    assert len(list(folder.glob("rows-*"))) == 1


def test_drafts_of_killed_writers_are_deleted_and_not_those_of_others(folder):
    table = table_in(folder)
    for name in ("table.7.draft", "rows-000000.7.draft", ".mine"):
        (folder / name).touch()
    table = again(table, folder)
    (folder / "table.8.draft").touch()
    table.save()
    left = {path.name for path in folder.iterdir()}
    assert not any(name.endswith("draft") for name in left)
    assert {"table", ".mine"} <= left


def test_a_checkpoint_from_before_starts_were_saved_goes_on(folder, monkeypatch):
    counts = lp.ReplayTable._saved_counts
    before = lambda self: {k: v for k, v in counts(self).items() if k != "start"}  # noqa: E731
    table = table_in(folder)
    insert(table, 1)
    with monkeypatch.context() as patch:
        patch.setattr(lp.ReplayTable, "_saved_counts", before)
        table = again(table, folder)
        insert(table, 1)
        table.save()
    assert again(table, folder).statistics()["inserted"] == 1


def test_an_empty_table_can_be_saved(folder):
    table = table_in(folder)
    table.save()
    assert again(table, folder).statistics()["held"] == 0


def test_rows_of_another_form_are_refused(folder):
    table = table_in(folder)
    insert(table, 1)
    table.save()
    end(table)
    like = {"reward": np.zeros(3, np.float32)}
    with pytest.raises(CheckpointMismatchError, match="of this table's form"):
        table_in(folder, like=like)


def test_rows_of_another_table_are_refused_with_both_forms_and_the_directory(folder):
    table = table_in(folder)
    insert(table, 1)
    table.save()
    table = again(table, folder)
    reward = np.zeros((1, 4), np.float32)
    with pytest.raises(TrajectoryError) as caught:
        table.insert({"reward": reward}, actor="a", version=0)
    for text in (
        "'id': 'int64[]', 'reward': 'float32[3]'",
        "{'reward': 'float32[4]'}",
        str(folder),
        "Choose another directory",
    ):
        assert text in str(caught.value)
    uneven = {**rows(2), "reward": np.zeros((2, 3), np.float32)}
    with pytest.raises(TrajectoryError, match="must have the form of the first ones"):
        table.insert(uneven, actor="a", version=0)
    insert(table, 2)
    assert sorted(held(table)) == [1, 2]


class Reward(NamedTuple):
    reward: np.ndarray


def test_rows_that_no_file_can_hold_are_refused_before_the_first_is_in(folder):
    found = Reward(np.zeros((1, 4), np.float32))
    table = table_in(folder)
    with pytest.raises(TrajectoryError, match="Reward, which is not registered"):
        table.insert(found, actor="a", version=0)
    insert(table, 1)
    table.save()
    assert table.statistics()["refused"] == {"a": 1}
    lp.ReplayTable(4).insert(found, actor="a", version=0)  # nowhere to be saved


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "000000000007").mkdir()
    with pytest.raises(CheckpointMismatchError, match="000000000007"):
        table_in(tmp_path)


@pytest.mark.parametrize("name", ["rows-of-mine.csv", "tables", "table.txt"])
def test_files_whose_names_are_like_those_of_a_table_are_refused(name, tmp_path):
    (tmp_path / name).touch()
    (tmp_path / "rows-000000").touch()
    with pytest.raises(CheckpointMismatchError, match=f"with {name}"):
        table_in(tmp_path)
    assert (tmp_path / name).exists()


def test_a_second_writer_is_refused(folder):
    table = table_in(folder)
    with pytest.raises(CheckpointInUseError):
        table_in(folder)
    end(table)


def test_a_table_that_cannot_go_on_lets_others_write(folder):
    table = table_in(folder)
    insert(table, 1)
    table.save()
    end(table)
    saved = (folder / "table").read_bytes()
    (folder / "table").write_bytes(b"")
    with pytest.raises(CheckpointError):
        table_in(folder)
    (folder / "table").write_bytes(saved)
    assert sorted(held(table_in(folder))) == [1]


@pytest.mark.parametrize("name", ["table", "rows-000000"])
def test_a_changed_byte_is_found(folder, name):
    table = table_in(folder)
    insert(table, 1)
    table.save()
    end(table)
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"`{name}` must be as it was written"):
        table_in(folder)


def test_a_table_saves_by_itself_and_once_more_when_its_node_ends(folder):
    def use(table):
        insert(table, 7)
        lp.stop()

    program = lp.Program("replay")
    node = lp.CourierNode(
        lp.ReplayTable, 8, checkpoint_dir=str(folder), checkpoint_every_s=NEVER_S
    )
    handle = program.add_node(node, label="table")
    program.add_node(lp.PyNode(use, handle), label="actor")
    with lp.launch(program, "threads") as run:
        run.wait(60)
    assert list(held(table_in(folder, capacity=8))) == [7]


CHILD = """
import sys, itertools
import numpy as np
import replicator.launchpad_bridge as lp
table = lp.ReplayTable(4000, checkpoint_dir=sys.argv[1], checkpoint_every_s=1e6)
first = table.statistics()["inserted"]
for number in itertools.count(first):
    ids = np.array([number])
    reward = np.repeat(ids[:, None], 3, axis=1).astype(np.float32)
    table.insert({"id": ids, "reward": reward}, actor="a", version=0)
    if number % 5 == 4:
        table.save()
        print(number, flush=True)
"""


@pytest.mark.slow
def test_what_was_inserted_before_the_last_save_is_there_after_sigkill(folder):
    for saves in (3, 7):
        command = [sys.executable, "-W", "ignore", "-c", CHILD, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(saves):
                last = int(child.stdout.readline())
            os.kill(child.pid, signal.SIGKILL)
            last = max([last, *map(int, child.stdout.read().split())])
        table = table_in(folder, capacity=4000)
        assert set(range(last + 1)) <= set(held(table))
        end(table)
