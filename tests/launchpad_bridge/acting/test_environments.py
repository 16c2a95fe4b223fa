"""Environments of gymnasium and dm_env become one kind, and can be gone back to."""

import itertools

import gymnasium
import jax
import numpy as np
import pytest
from ale_py.env import AtariEnv
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from replicator.errors import ArgumentError, DecodeError
from replicator.launchpad_bridge.acting import (
    from_dm_env,
    from_gymnasium,
    from_gymnasium_envs,
)
from replicator.launchpad_bridge.acting.snapshots import pack, unpack
from tests.launchpad_bridge.acting.counter import Counter, DmCounter, GoesBack

SIZE = 3


class VectorOfCounters(SyncVectorEnv):
    """With snapshots of its own."""

    def snapshot(self):
        return [env.snapshot() for env in self.envs], self._autoreset_envs.tolist()

    def restore(self, snapshot):
        states, autoreset = snapshot
        self._autoreset_envs = np.array(autoreset)
        for env, state in zip(self.envs, states, strict=True):
            env.restore(state)


def vector():
    return from_gymnasium(VectorOfCounters([GoesBack] * SIZE))


def serial():
    return from_gymnasium_envs([GoesBack] * SIZE)


def of_dm_env():
    return from_dm_env([DmCounter] * SIZE)


def same_step():
    made = VectorOfCounters([GoesBack] * SIZE, autoreset_mode=AutoresetMode.SAME_STEP)
    return from_gymnasium(made)


MAKERS = pytest.mark.parametrize("make", [vector, serial, of_dm_env, same_step])


def steps_of(environment, number, *, seed=7):
    """Return the first step, and those after so many drawn actions."""
    actions = np.random.default_rng(0).integers(2, size=(number, environment.size))
    return [environment.reset(seed), *map(environment.step, actions)]


def equal(one, other):
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), one, other))


@pytest.mark.parametrize("make", [vector, of_dm_env])
def test_all_libraries_give_the_same_steps(make):
    for step, expected in zip(
        steps_of(make(), 50), steps_of(serial(), 50), strict=True
    ):
        assert equal(step, expected)


@MAKERS
def test_a_step_is_first_after_each_last_one(make):
    steps = steps_of(make(), 50)
    assert steps[0].first.all()
    for before, after in itertools.pairwise(steps):
        assert (after.first == before.last).all()
        assert not (after.first & after.last).any()


@MAKERS
def test_a_terminated_episode_has_no_discount_and_one_that_was_cut_off_has(make):
    steps = steps_of(make(), 50)
    discounts = {True: set(), False: set()}
    for step in steps:
        for count, discount in zip(
            step.observation["count"][step.last], step.discount[step.last], strict=True
        ):
            discounts[bool(count % 2)].add(float(discount))
    assert discounts == {True: {1.0}, False: {0.0}}


@MAKERS
def test_a_first_step_has_neither_reward_nor_discount(make):
    for step in steps_of(make(), 50):
        assert step.reward.dtype == step.discount.dtype == np.float32
        assert not step.reward[step.first].any()
        assert not step.discount[step.first].any()


@MAKERS
def test_the_same_seed_gives_the_same_episodes_again(make):
    environment = make()
    assert equal(steps_of(environment, 20), steps_of(environment, 20))
    assert not equal(steps_of(environment, 20), steps_of(environment, 20, seed=8))


@MAKERS
@pytest.mark.parametrize("after", [0, 3, 4, 5, 6, 7])
def test_another_environment_goes_on_from_a_snapshot(make, after):
    environment, other = make(), make()
    latest = steps_of(environment, after)[-1]
    assert environment.can_snapshot
    assert equal(other.restore(environment.snapshot()), latest)
    for actions in np.random.default_rng(1).integers(2, size=(30, SIZE)):
        assert equal(environment.step(actions), other.step(actions))


@MAKERS
def test_equal_environments_have_equal_snapshots(make):
    one, other = make(), make()
    steps_of(one, 9), steps_of(other, 9)
    assert one.snapshot() == other.snapshot()


@MAKERS
def test_an_episode_is_seen_from_its_first_observation_to_its_last(make):
    age = np.zeros(SIZE, int)
    for step in steps_of(make(), 50):
        age = np.where(step.first, 0, age + 1)
        assert step.observation["count"].tolist() == age.tolist()


def test_a_mode_of_starting_again_by_hand_is_refused_by_name():
    mode = AutoresetMode.DISABLED
    with pytest.raises(ArgumentError, match=f"{mode}.*Make it with `autoreset_mode="):
        from_gymnasium(SyncVectorEnv([Counter], autoreset_mode=mode))


class Masked(Counter):
    """Says in its infos which actions there are."""

    def reset(self, **options):
        observation, _ = super().reset(**options)
        return observation, {"mask": self._mask()}

    def step(self, action):
        *step, _ = super().step(action)
        return *step, {"mask": self._mask()}

    def _mask(self):
        return np.arange(4) <= self._count


def masked_vector(mode):
    made = SyncVectorEnv([Masked] * SIZE, autoreset_mode=mode)
    return from_gymnasium(made, infos=["mask"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_gymnasium_envs([Masked] * SIZE, infos=["mask"]),
        lambda: masked_vector(AutoresetMode.NEXT_STEP),
        lambda: masked_vector(AutoresetMode.SAME_STEP),
    ],
)
def test_infos_that_are_asked_for_are_seen_at_every_step(make):
    for step in steps_of(make(), 50):
        count = step.observation["observation"]["count"]
        mask = step.observation["info"]["mask"]
        assert (mask == (np.arange(4) <= count[:, None])).all()


@pytest.mark.parametrize(
    "adapt",
    [
        from_gymnasium_envs,
        lambda makers, **o: from_gymnasium(SyncVectorEnv(makers), **o),
    ],
)
def test_infos_that_are_not_there_are_refused_with_those_that_are(adapt):
    with pytest.raises(ArgumentError, match="got 'masks'; present: mask"):
        adapt([Masked], infos=["masks"]).reset(0)


def test_a_vector_environment_of_gymnasium_itself_has_no_snapshots():
    environment = from_gymnasium(gymnasium.make_vec("CartPole-v1", num_envs=2))
    environment.reset(0)
    assert not environment.can_snapshot
    with pytest.raises(ArgumentError, match="`snapshot` and `restore`"):
        environment.snapshot()


def test_a_wrapper_that_does_not_say_how_to_go_back_cannot():
    def make():
        return gymnasium.wrappers.TimeLimit(GoesBack(), 3)

    assert not from_gymnasium_envs([make]).can_snapshot


@pytest.mark.parametrize("adapt", [from_gymnasium_envs, from_dm_env])
def test_no_environment_at_all_is_refused(adapt):
    with pytest.raises(ArgumentError, match="`makers` must hold at least one"):
        adapt([])


def test_the_emulator_of_atari_goes_on_with_its_sticky_actions():
    def make():
        return AtariEnv(
            "pong", obs_type="ram", frameskip=(2, 5), repeat_action_probability=0.25
        )

    environment, other = from_gymnasium_envs([make]), from_gymnasium_envs([make])
    drawn = np.random.default_rng(0).integers(6, size=(150, 1))
    environment.reset(3)
    for actions in drawn[:30]:
        environment.step(actions)
    other.restore(environment.snapshot())
    for actions in drawn[30:]:
        assert equal(environment.step(actions), other.step(actions))


def test_the_vector_environment_of_atari_is_one():
    environment = from_gymnasium(AtariVectorEnv("pong", 2, num_threads=1))
    step = environment.reset(3)
    assert step.observation.shape == (2, 4, 84, 84)
    assert not environment.can_snapshot
    assert equal(step, environment.reset(3))
    assert not environment.step(np.zeros(2, np.int32)).first.any()


def test_a_snapshot_that_is_cut_off_is_refused():
    packed = pack({"a": np.arange(3)})
    assert unpack(packed)["a"].tolist() == [0, 1, 2]
    with pytest.raises(DecodeError):
        unpack(packed[:9])


def test_code_is_no_snapshot():
    with pytest.raises(DecodeError):
        unpack(b"cos\nsystem\n(S'true'\ntR.")
