"""The evaluator: whole episodes of each newest policy, by seeds of its own."""

import jax.numpy as jnp
import numpy as np

from experiments import evaluator
from replicator.base.host.json_lines import read_lines
from replicator.launchpad_bridge import acting
from replicator.launchpad_bridge.acting.environments import Step, first_step
from replicator.launchpad_bridge.learner.published import Variables
from replicator.launchpad_bridge.running import node_context
from tests.experiments.test_off_policy import reach

PUBLISHED = (4, None, 9)  # None: nothing newer yet


class PaysActions:
    """One environment that pays what it is given, for three steps; keeps its seeds."""

    size = 1

    def __init__(self):
        self.seeds = []

    def reset(self, seed):
        self.seeds.append(seed)
        self.age = 0
        return first_step(np.zeros((1, 2)), 1)

    def step(self, actions):
        self.age += 1
        is_last, one = np.array([self.age == 3]), np.ones(1, np.float32)
        return Step(np.zeros((1, 2)), actions, one, np.zeros(1, bool), is_last)


class Publishing:
    """In place of a learner; behind its last version it stops the node."""

    def __init__(self, stop):
        self.stop, self.known = stop, []

    def get_variables(self, *, newer_than, timeout_s):
        assert timeout_s > 0
        self.known.append(newer_than)
        if len(self.known) > len(PUBLISHED):
            self.stop.set()
            return None
        version = PUBLISHED[len(self.known) - 1]
        values = {"params": np.float32(version or 0)}
        return version and Variables(version=version, values=values)


def policy(variables, observation, first, core, key):
    return jnp.full(first.shape, variables["params"]), {}, core


def watched(folder):
    """Run an evaluator of seed 7 to its end; return environment and learner."""
    context, environment = node_context.loose_context(), PaysActions()
    learner = Publishing(context.stop_event)
    given = (policy, lambda size: (), folder, 7, learner)
    with context.entered():
        evaluator.Evaluator(lambda size: environment, *given).run()
    return environment, learner


def test_each_new_version_is_played_once_and_logged_until_the_program_stops(tmp_path):
    _, learner = watched(tmp_path)
    assert learner.known == [None, 4, 4, 9]
    assert list(read_lines(tmp_path / evaluator.NAME)) == [[4, 12.0], [9, 27.0]]


def test_its_episodes_have_seeds_that_no_actor_has(tmp_path):
    environment, _ = watched(tmp_path)
    of_actors = {
        acting.environment_seed(7, index, number=number, start=start)
        for index in range(16)
        for number in range(8)
        for start in range(4)
    }
    assert len(set(environment.seeds)) == len(environment.seeds) == 2
    assert of_actors.isdisjoint(environment.seeds)


def test_an_episode_in_which_the_program_stops_counts_for_nothing():
    choose = lambda observation, first, t: np.ones(1, np.float32)  # noqa: E731
    stops = iter([False, True])
    given = {"seed": 0, "is_stopped": lambda: next(stops)}
    assert evaluator.play(PaysActions(), choose, **given) == []


def test_each_environments_first_episode_counts_in_an_evaluation():
    seen = []

    def choose(observation, first, t):
        seen.append(t)
        return np.ones((3, 2), np.float32)

    assert evaluator.play(reach(3), choose, seed=0) == [5.0] * 3
    assert seen == [0, 1, 2, 3, 4]
