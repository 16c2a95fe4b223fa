"""What actors have played is counted by what a learner took, and goes on with it."""

import json

import numpy as np

from replicator.launchpad_bridge.acting import LocalInference, start, unroll
from replicator.launchpad_bridge.learner.played import Played
from replicator.launchpad_bridge.trajectories.table import Taken
from tests.launchpad_bridge.acting.counter import initial_core, policy, variables_of
from tests.launchpad_bridge.learner.learning import make_environment


def taken(count, *, length=7):
    """Return what a table gives out of so many unrolls."""
    environment, act = make_environment(0), LocalInference(policy, seed=0, index=0)
    act.use(variables_of(0))
    acting = start(environment, initial_core, seed=3)
    for _ in range(count):
        unrolled = unroll(environment, act, acting, length)
        acting = unrolled.acting
        versions = np.zeros(2, np.int64)
        yield Taken(
            trajectories=unrolled.trajectories,
            versions=versions,
            episodes=unrolled.episodes,
        )


def played(batches):
    found = Played()
    for number, each in enumerate(batches):
        found.note(each, {"dropped": {"too_old": number}})
    return found


def test_steps_returns_and_lengths_are_those_of_the_environments():
    batches = list(taken(20))
    numbers = played(batches).numbers()
    counts = np.concatenate([b.trajectories["observation"]["count"] for b in batches])
    last = np.concatenate([each.trajectories["last"] for each in batches])
    first = np.concatenate([each.trajectories["first"] for each in batches])
    returns = [gained for each in batches for gained in each.episodes]
    lengths = counts[:, 1:][last[:, 1:]][-100:]
    assert numbers == {
        "episode_return": np.mean(returns[-100:]),
        "episode_length": lengths.mean(),
        "episodes": len(returns),
        "environment_steps": (~first[:, 1:]).sum(),
        "dropped": {"too_old": 19},
    }


def test_there_are_no_means_before_there_is_an_episode():
    numbers = played(taken(1, length=1)).numbers()
    assert numbers == {"episodes": 0, "environment_steps": 2, "dropped": {"too_old": 0}}


def test_returns_that_are_no_numbers_are_in_no_mean():
    ended = Taken(trajectories={}, versions=np.zeros(1), episodes=[np.nan, 3.0])
    assert played([ended]).numbers()["episode_return"] == 3.0


def test_it_goes_on_from_what_it_said_as_json():
    batches = list(taken(8))
    found = played(batches[:4])
    again = Played.from_json(json.loads(json.dumps(found.to_json())))
    for each in batches[4:]:
        found.note(each, {})
        again.note(each, {})
    assert again.numbers() == found.numbers()
