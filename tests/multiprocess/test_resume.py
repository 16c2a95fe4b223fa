"""A run that was killed goes on in another number of processes, and loses nothing."""

import numpy as np
import pytest

from tests.checkpoint.test_damage import flipped
from tests.multiprocess import programs
from tests.multiprocess.processes import assert_killed, run_processes, values
from tests.training.test_resume import numbers

pytestmark = pytest.mark.slow


def run(folder, processes, devices, **options):
    return run_processes(
        programs.resumable,
        folder.parent,
        processes=processes,
        devices=devices,
        directory=folder,
        **options,
    )


def die(folder, processes, devices, **options):
    assert_killed(run(folder, processes, devices, die_after=4, **options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in one process that nobody killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    folder.mkdir()
    [value] = values(run(folder, 1, 4))
    return value, folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """One that began in two processes and went on in four."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    folder.mkdir()
    die(folder, 2, 2)
    return values(run(folder, 4, 1)), folder


@pytest.mark.parametrize("what", ["params", "opt"])
def test_more_processes_go_on_with_the_same_bits(killed, whole, what):
    expected = programs.bits(whole[0][what])
    for value in killed[0]:
        assert programs.bits(value[what]) == expected


def test_what_each_replica_holds_goes_on_with_it(killed, whole):
    found = np.concatenate([value["own"] for value in killed[0]])
    np.testing.assert_array_equal(found, whole[0]["own"])


def test_records_are_those_of_a_run_that_was_not_killed(killed, whole):
    found, expected = [numbers(run / "records") for run in (killed[1], whole[1])]
    assert found == expected
    assert len(found) == programs.STEPS


def test_all_processes_fall_back_to_the_same_whole_checkpoint(killed, whole):
    folder = killed[1]
    newest = max(folder.glob("checkpoints/[0-9]*"))
    path = next(path for path in newest.glob("state-*/*/c.*"))
    path.write_bytes(flipped(path.read_bytes(), 3))
    ended = run(folder, 2, 2)
    for value in values(ended):
        assert programs.bits(value["params"]) == programs.bits(whole[0]["params"])
        assert value["examples"] > 0
    assert all("got damage" in each.output for each in ended)


def test_fewer_processes_read_each_example_once(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    die(folder, 4, 1, strided=True)
    values(run(folder, 2, 2, strided=True))
    steps = sorted(folder.glob("seen/*.npy"), key=lambda path: int(path.stem))
    assert [path.stem for path in steps] == [str(step) for step in range(1, 11)]
    # 24 of 96 examples a step: two passes and a half.
    seen = np.sum([np.load(path) for path in steps], axis=0)
    np.testing.assert_array_equal(seen, [3] * 48 + [2] * 48)
