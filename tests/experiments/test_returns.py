"""What is kept of the episodes of a run, over its sittings."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.returns import Returns, average_of


@pytest.fixture
def played(tmp_path):
    """The folder of a run that played three updates."""
    returns = Returns(tmp_path, updates=0)
    for update in (1, 2, 3):
        returns.add(update, [float(update), -1.0])
    return tmp_path


def test_episodes_behind_the_checkpoint_are_dropped_for_good(played):
    expected = [(1, 1.0), (1, -1.0), (2, 2.0), (2, -1.0)]
    assert Returns(played, updates=2).episodes == expected
    assert Returns(played).episodes == expected


def test_a_run_that_begins_anew_begins_anew(played):
    assert Returns(played, updates=0).episodes == []
    assert Returns(played).episodes == []


def test_a_line_that_was_cut_short_is_dropped_and_written_after(played):
    with (played / "returns.jsonl").open("a") as file:
        file.write("[4, 1")
    Returns(played).add(4, [7.0])
    assert Returns(played).episodes[-2:] == [(3, -1.0), (4, 7.0)]


def test_the_average_is_that_of_the_last_episodes(played):
    assert average_of(Returns(played).episodes, 2) == 1.0
    assert average_of([], 2) is None


def test_threads_add_whole_lines(tmp_path):
    returns = Returns(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda update: returns.add(update, [0.0] * 20), range(50)))
    assert sorted(Returns(tmp_path).episodes) == sorted(returns.episodes)
    assert len(returns.episodes) == 1000
