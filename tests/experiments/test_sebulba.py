"""Acting on one slice and learning on another."""

import contextlib
import threading

import pytest

from experiments import sebulba
from experiments.sebulba import Batch, Config, rate, run
from replicator import controller
from tests.experiments.command import found_by

pytestmark = pytest.mark.usefixtures("standard_promotion")
SMALL = Config(
    environments=4, batch_size=2, unroll_length=2, steps=5, minutes=10.0, waiting=1
)


def test_the_rate_is_that_of_the_second_half():
    assert rate([(0.0, 0.0), (4.0, 10.0), (6.0, 30.0), (8.0, 50.0)]) == 10.0
    assert rate([(2.0, 50.0)]) == 25.0


def endless(config, agent, act, stopped):
    version = 0
    while not stopped.is_set():
        yield Batch(trajectories={}, version=version)
        version += 1


def test_a_learner_that_stops_ends_the_thread_that_waits_for_room(monkeypatch):
    monkeypatch.setattr(sebulba, "_unrolled", endless)
    before = set(threading.enumerate())
    with contextlib.closing(sebulba._played(SMALL, None, None)) as batches:
        assert [next(batches).version for _ in range(3)] == [0, 1, 2]
    began = set(threading.enumerate()) - before
    assert not any(thread.name.startswith("acting") for thread in began)


def test_an_error_of_the_games_ends_the_learner(monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("the power failed")

    monkeypatch.setattr(sebulba.atari, "make_games", broken)
    with pytest.raises(OSError, match="the power failed"):
        next(sebulba._played(SMALL, None, None))


@pytest.mark.slow
@pytest.mark.nightly
def test_it_learns_from_each_batch_with_a_policy_some_updates_old():
    with controller.local(islands=2, devices=1) as pw:
        found = run(pw, SMALL)
    assert len(found.lags) == SMALL.steps
    assert found.lags[0] == 0
    assert all(0 <= lag <= at for at, lag in enumerate(found.lags))
    steps = [made for _, made in found.curve]
    assert steps == [4.0 * update for update in range(1, SMALL.steps + 1)]
    assert all(found.spans.found.values())


@pytest.mark.slow
def test_it_ends_with_a_picture_and_the_rates_of_both(tmp_path):
    flags = ["--environments=4", "--batch_size=2", "--unroll_length=2", "--steps=4"]
    flags += ["--launch_type=threads", "--actors=1", f"--directory={tmp_path}"]
    found = found_by("sebulba", *flags)
    assert (found["updates"], found["game"]) == (4, "pong")
    assert found["steps_per_s"] > 0
    assert found["program_steps_per_s"] > 0
    assert 0 <= found["acting_busy"] <= 1
    assert 0 <= found["learning_busy"] <= 1
    assert (tmp_path / "sebulba.png").stat().st_size > 1000
