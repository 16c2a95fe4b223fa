"""Steps become trajectories: what is in them, and what follows what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicator.errors import ArgumentError
from replicator.launchpad_bridge.acting import (
    EnvironmentFailedError,
    LocalInference,
    Step,
    environment_seed,
    from_gymnasium_envs,
    start,
    unroll,
)
from replicator.launchpad_bridge.acting.unroll import pack_acting, unpack_acting
from tests.launchpad_bridge.acting.counter import (
    WIDTH,
    GoesBack,
    initial_core,
    policy,
    variables_of,
)
from tests.launchpad_bridge.acting.test_environments import equal

SIZE, LENGTH = 3, 20


def make():
    return from_gymnasium_envs([GoesBack] * SIZE)


def local(*, index=0, version=0):
    act = LocalInference(policy, seed=1, index=index)
    act.use(variables_of(version))
    return act


def unrolls(number, *, length=LENGTH, act=None):
    environment, act = make(), act or local()
    acting = start(environment, initial_core, seed=5)
    found = []
    for _ in range(number):
        unrolled = unroll(environment, act, acting, length)
        acting = unrolled.acting
        found.append(unrolled)
    return found


def test_leaves_are_rows_over_time():
    ((trajectories, _, _),) = unrolls(1)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), trajectories)
    assert shapes == {
        "observation": {
            "place": ((SIZE, LENGTH + 1, WIDTH), "float32"),
            "count": ((SIZE, LENGTH + 1), "int32"),
        },
        "first": ((SIZE, LENGTH + 1), "bool"),
        "last": ((SIZE, LENGTH + 1), "bool"),
        "age": ((SIZE, LENGTH + 1), "int32"),
        "action": ((SIZE, LENGTH), "int32"),
        "reward": ((SIZE, LENGTH), "float32"),
        "discount": ((SIZE, LENGTH), "float32"),
        "extras": {"logits": ((SIZE, LENGTH, 2), "float32")},
        "core": ((SIZE, WIDTH), "float32"),
    }


def test_an_unroll_begins_with_what_the_one_before_saw_last():
    one, other = (each.trajectories for each in unrolls(2))
    for name in ("observation", "first", "last", "age"):
        ends = jax.tree.map(lambda leaf: leaf[:, -1], one[name])
        assert equal(ends, jax.tree.map(lambda leaf: leaf[:, 0], other[name]))


def test_two_unrolls_are_one_of_twice_the_length():
    (whole,) = unrolls(1, length=2 * LENGTH)
    halves = [each.trajectories for each in unrolls(2)]
    for name in ("action", "reward", "discount", "extras"):
        joined = jax.tree.map(
            lambda *p: np.concatenate(p, 1), *(h[name] for h in halves)
        )
        assert equal(whole.trajectories[name], joined)


def test_the_transition_to_a_first_step_counts_nothing():
    ((trajectories, _, _),) = unrolls(1)
    ignored = trajectories["last"][:, :-1]
    assert ignored.any()
    assert (trajectories["first"][:, 1:] == ignored).all()
    assert not trajectories["discount"][ignored].any()
    assert not trajectories["reward"][ignored].any()


def test_the_core_is_the_one_before_the_first_step():
    one, other = unrolls(2)
    assert not one.trajectories["core"].any()
    assert equal(other.trajectories["core"], np.asarray(one.acting.core))
    assert other.trajectories["core"].any()


def test_episodes_return_the_sums_of_their_rewards():
    found = unrolls(4)
    episodes = [each for unrolled in found for each in unrolled.episodes]
    rewards = sum(each.trajectories["reward"].sum() for each in found)
    assert len(episodes) == sum(
        each.trajectories["last"][:, 1:].sum() for each in found
    )
    assert sum(episodes) + found[-1].acting.returns.sum() == rewards


def test_an_age_is_how_many_steps_an_episode_has_taken():
    for unrolled in unrolls(4):
        rows = unrolled.trajectories
        assert equal(rows["age"], rows["observation"]["count"])
        assert equal(rows["age"][:, -1], unrolled.acting.ages)


def test_logits_are_those_of_the_policy():
    ((trajectories, _, _),) = unrolls(1)
    core = trajectories["core"]
    key = jax.random.fold_in(jax.random.key(1), 0)
    for t in range(LENGTH):
        seen = jax.tree.map(lambda leaf, t=t: leaf[:, t], trajectories["observation"])
        action, extras, core = policy(
            variables_of(0),
            seen,
            trajectories["first"][:, t],
            core,
            jax.random.fold_in(key, t),
        )
        assert equal(action, trajectories["action"][:, t])
        np.testing.assert_allclose(
            extras["logits"], trajectories["extras"]["logits"][:, t], rtol=1e-6
        )


def test_actors_draw_by_keys_of_their_own():
    one, other = (unrolls(1, act=local(index=i))[0].trajectories for i in range(2))
    assert not equal(one["action"], other["action"])


def test_trajectories_are_not_written_to_again():
    environment = make()
    act, acting = local(), start(environment, initial_core, seed=5)
    one = unroll(environment, act, acting, LENGTH)
    kept = jax.tree.map(np.copy, one.trajectories)
    unroll(environment, act, one.acting, LENGTH)
    assert equal(one.trajectories, kept)


class WritesAgain:
    """An environment whose steps lie in the same arrays."""

    size, can_snapshot = 1, False

    def __init__(self):
        self._step = Step(*(np.zeros(1, kind) for kind in ("f4", "f4", "f4", "?", "?")))

    def reset(self, seed):
        return self._step

    def step(self, actions):
        self._step.observation[:] += 1
        return self._step


def test_what_was_seen_is_copied_before_the_next_step():
    environment = WritesAgain()
    acting = start(environment, lambda size: (), seed=0)
    trajectories = unroll(environment, stand_still, acting, 3).trajectories
    assert trajectories["observation"].tolist() == [[0, 1, 2, 3]]


def test_it_stops_within_a_step():
    environment, asked = make(), []
    acting = start(environment, initial_core, seed=5)

    def is_stopped():
        asked.append(None)
        return len(asked) == 4

    assert unroll(environment, local(), acting, LENGTH, is_stopped=is_stopped) is None
    assert (
        environment.step(np.zeros(SIZE, int)).observation["count"].tolist() == [4] * 3
    )


def test_an_environment_that_fails_says_after_how_many_steps():
    class Failing(GoesBack):
        def step(self, action):
            if self._count == 2:
                raise OSError("no more")
            return super().step(action)

    environment = from_gymnasium_envs([Failing])
    acting = start(environment, initial_core, seed=5)
    with pytest.raises(EnvironmentFailedError, match="OSError after 2 steps: no more"):
        unroll(environment, local(), acting, LENGTH)


class Changing:
    """Returns steps of which one leaf is another from so many steps on."""

    size, can_snapshot = SIZE, False

    def __init__(self, begins, **leaves):
        self._begins, self._leaves, self._steps = begins, leaves, 0

    def reset(self, seed):
        zeros, no = np.zeros(SIZE, np.float32), np.zeros(SIZE, bool)
        seen = {"place": np.zeros((SIZE, WIDTH), np.int32)}
        step = Step(seen, zeros, zeros, ~no, no)
        return step._replace(**self._leaves) if self._steps == self._begins else step

    def step(self, actions):
        self._steps += 1
        return self.reset(0)


def stand_still(observation, first, core, steps):
    return np.zeros(len(first), np.int32), (), core


@pytest.mark.parametrize("begins", [0, 3])
@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ({"last": np.zeros(SIZE, np.uint8)}, "`last`"),
        ({"first": np.zeros((SIZE, 1), bool)}, "`first`"),
        ({"reward": np.float32(1)}, "`reward`"),
        ({"discount": np.ones(SIZE)}, "`discount`"),
        ({"observation": {"place": np.zeros((1, WIDTH), np.int32)}}, "`observation/p"),
    ],
)
def test_a_step_that_is_not_one_of_so_many_environments_is_refused(
    leaves, said, begins
):
    environment = Changing(begins, **leaves)
    acting = start(environment, lambda n: (), seed=0)
    after = max(begins - 1, 0)  # the step that made it is not counted
    expected = f"got another after {after} steps: {said}"
    with pytest.raises(EnvironmentFailedError, match=expected):
        unroll(environment, stand_still, acting, 5)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"place": np.full((SIZE, WIDTH), 0.75)}, "`observation/place`"),
        ({"place": np.zeros((SIZE, 1), np.int32)}, "`observation/place`"),
        ({"other": np.zeros((SIZE, WIDTH), np.int32)}, "`observation/place`"),
        ({}, "`observation/place`"),
    ],
)
def test_an_observation_that_changes_its_form_in_the_midst_is_refused(seen, said):
    environment = Changing(3, observation=seen)
    acting = start(environment, lambda n: (), seed=0)
    with pytest.raises(EnvironmentFailedError, match=f"after 2 steps: {said}"):
        unroll(environment, stand_still, acting, 5)


def test_seeds_of_environments_follow_from_the_numbers():
    seeds = {environment_seed(run, actor) for run in range(10) for actor in range(10)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert environment_seed(1, 2) == environment_seed(1, 2)


@pytest.mark.parametrize("make_core", [initial_core, lambda n: jnp.zeros((n, WIDTH))])
def test_a_policy_is_compiled_once(make_core, caplog):
    act, environment = LocalInference(lambda *a: policy(*a), seed=1, index=0), make()
    act.use(variables_of(0))
    with jax.log_compiles():
        acting = start(environment, make_core, seed=5)
        acting = unroll(environment, act, acting, LENGTH).acting
        packed = pack_acting(environment, acting)
        act.use(variables_of(1))
        acting = unpack_acting(environment, make_core, packed)
        unroll(environment, act, acting, LENGTH)
    compiled = [r.message for r in caplog.records if "Compiling jit(_act)" in r.message]
    assert len(compiled) == 1


def test_an_action_may_be_clipped_in_place(monkeypatch):
    environment, act = make(), local()
    step, acting = environment.step, start(environment, initial_core, seed=5)

    def clips(actions):
        return step(np.clip(actions, 0, 0, out=actions))

    monkeypatch.setattr(environment, "step", clips)
    chosen = unroll(environment, act, acting, LENGTH).trajectories["action"]
    assert set(np.unique(chosen)) == {0, 1}


@pytest.mark.parametrize("name", ["action", "extras/size"])
def test_what_a_policy_returns_of_no_environment_is_refused_by_name(name):
    def act(observation, first, core, steps):
        action, size = np.zeros(SIZE, np.int32), np.zeros(SIZE)
        if name == "action":
            return action[0], {"size": size}, core
        return action, {"size": np.float32(1)}, core

    environment = make()
    acting = start(environment, initial_core, seed=5)
    message = f"a row for each of {SIZE} environments, got `{name}` .*32"
    with pytest.raises(ArgumentError, match=message):
        unroll(environment, act, acting, LENGTH)
