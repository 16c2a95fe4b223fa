"""Processes save what they hold, and restore it in other layouts and numbers."""

import numpy as np
import pytest

from tests.multiprocess import shard_programs as programs
from tests.multiprocess.processes import run_processes, values

pytestmark = pytest.mark.slow
LAYOUTS = [(1, 8), (2, 4)]


def on(layout, program, directory, **arguments):
    processes, devices = layout
    return values(
        run_processes(
            program,
            directory.parent,
            processes=processes,
            devices=devices,
            directory=directory,
            **arguments,
        )
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    found = {}
    for layout in LAYOUTS:
        directory = tmp_path_factory.mktemp("saved") / "run"
        found[layout] = directory, on(layout, programs.save, directory)
    return found


def test_each_shard_is_written_by_one_process_and_the_work_is_even(saved):
    directory, found = saved[2, 4]
    (state,) = directory.glob(f"{2:012d}/state-*")
    names = [name for process in found for name in process["names"]]
    there = {f"{path.parent.name}/{path.name}" for path in state.glob("*/c.*")}
    assert sorted(names) == sorted(there)
    sizes = [
        sum((state / name).stat().st_size for name in process["names"])
        for process in found
    ]
    assert max(sizes) < 1.1 * np.mean(sizes)


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_what_is_saved_by_any_number_is_restored_in_any_other(saved, before, after):
    directory, found = saved[before]
    for process in on(after, programs.restore, directory, rotate=2):
        assert process["step"] == 2
        for one, other in zip(process["values"], found[0]["values"], strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_a_directory_that_processes_do_not_share_is_refused_in_all(tmp_path):
    for refused in on((2, 1), programs.open_apart, tmp_path / "apart"):
        assert "must be one that all processes can write to" in refused
        assert "no file of process 1" in refused


def test_a_leaf_with_a_piece_in_no_process_that_saves_is_refused(tmp_path):
    for process, found in enumerate(on((2, 1), programs.save_alone, tmp_path / "at")):
        refused, steps = found
        assert refused.startswith(
            "`arrays` must be cut into equal pieces, each in a process that saves, got "
            f"one of `rows` at {(128 - 128 * process, 0)} that is not."
        )
        assert steps == ()


def test_a_save_that_fails_in_one_process_fails_in_all_and_the_next_works(tmp_path):
    for process in on((2, 1), programs.fail_in_one, tmp_path / "full"):
        assert "No space left on device" in process["raised"]
        assert process["steps"] == (1, 3)
    assert not list((tmp_path / "full").glob(".writing-*"))
