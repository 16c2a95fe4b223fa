"""Tasks of control: bounds, and episodes that time cuts."""

import gymnasium
import numpy as np
import pytest

from experiments.environments import control
from replicator.errors import ArgumentError


class Reach(gymnasium.Env):
    """Shows the action that it was given; its bounds differ by dimension."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def __init__(self, low=(-3.0, 0.0), high=(3.0, 1.0)):
        self.action_space = gymnasium.spaces.Box(
            np.array(low, np.float32), np.array(high, np.float32)
        )

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        return np.array(action), 1.0, False, False, {}


@pytest.mark.parametrize(
    ("action", "given"), [([-1, -1], [-3, 0]), ([1, 1], [3, 1]), ([0, 0.5], [0, 0.75])]
)
def test_actions_are_scaled_to_the_bounds_of_each_dimension(action, given):
    observation, *_ = control.Scaled(Reach()).step(np.array(action, np.float32))
    np.testing.assert_allclose(observation, given)
    assert observation.dtype == np.float32


@pytest.mark.parametrize(("name", "bound"), [("low", -np.inf), ("high", np.inf)])
def test_infinite_bounds_are_refused_by_name(name, bound):
    task = Reach(**{name: (1.0, bound)})
    message = rf"`action_space.{name}` must be finite, got -?inf in dimension 1\. "
    with pytest.raises(ArgumentError, match=message):
        control.Scaled(task)


def suite_or_skip(name):
    if name.startswith(control.SUITE):
        pytest.importorskip("dm_control", reason="jax-replicator[control]")
    pytest.importorskip("mujoco", reason="jax-replicator[control]")


@pytest.mark.parametrize(
    ("name", "shape", "actions"),
    [
        ("InvertedPendulum-v5", (4,), 1),
        ("HalfCheetah-v5", (17,), 6),
        ("dm_control/cartpole-swingup", (5,), 1),
    ],
)
def test_tasks_have_the_form_that_is_promised(name, shape, actions):
    suite_or_skip(name)
    assert control.sizes_of(name) == (shape, actions)
    environment = control.make_tasks(name, 2)
    step = environment.reset(0)
    assert step.observation.shape == (2, *shape)
    step = environment.step(np.zeros((2, actions), np.float32))
    assert step.observation.dtype == step.reward.dtype == np.float32


def test_an_episode_of_the_control_suite_is_cut_by_time():
    name = "dm_control/cartpole-swingup"
    suite_or_skip(name)
    environment = control.make_tasks(name, 1)
    step, count = environment.reset(0), 0
    while not step.last:
        step, count = environment.step(np.zeros((1, 1), np.float32)), count + 1
    assert (count, step.discount.tolist()) == (1000, [1.0])


def test_a_task_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match="`--env` must be a task that is installed"):
        control.make_task("NoSuchTask-v5")
