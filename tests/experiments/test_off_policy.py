"""The agent that learns from samples: law 1, weights, and its loop in one process."""

import dataclasses
import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicator
import replicator.launchpad_bridge as lp
from experiments import agent_program, anakin_replay, evaluator, in_turn, replayed
from experiments.environments import control, pendulum
from experiments.off_policy import OffPolicy
from models.d4pg import D4pg
from models.dqn import Dqn
from models.impala import ActorCritic
from models.sac import Sac
from replicator import PerReplica
from replicator.launchpad_bridge.acting import from_gymnasium_envs
from tests.experiments.environments.test_control import Reach

pytestmark = pytest.mark.usefixtures("standard_promotion")
AGENT = OffPolicy(
    net=D4pg(action_size=2, v_min=-2.0, v_max=2.0, atoms=11, hidden=16),
    observation_shape=(2,),
    optimizer=optax.adam(1e-2),
    warmup=3,
)
AGENTS = {
    "d4pg": AGENT,
    "dqn": dataclasses.replace(
        AGENT, net=Dqn(network=ActorCritic(num_actions=2, torso="mlp", hidden=16))
    ),
    "sac": dataclasses.replace(AGENT, net=Sac(action_size=2, hidden=16)),
}


def batch_of(rows, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    batch = {
        "trajectories": {
            "observation": draw(rows, 2),
            "next_observation": draw(rows, 2),
            "action": np.tanh(draw(rows, 2)),
            "reward": draw(rows),
            "discount": np.full(rows, 0.9, np.float32),
        },
        "probability": rng.uniform(0.01, 1, rows).astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, batch)


def learned(agent, replicas, *, accumulate=1, steps=3):
    rep = replicator.Replicator(devices=jax.devices()[:replicas])
    state = rep.init(agent.init_fn, seed=0)
    step, metrics = rep.compile(agent.step_fn, accumulate=accumulate), {}
    for number in range(steps):
        batch = batch_of(8, number)
        if agent is AGENTS["dqn"]:
            chosen = (batch["trajectories"]["action"][:, 0] > 0).astype(np.int32)
            batch["trajectories"]["action"] = chosen
        state, metrics = step(state, batch, jax.random.key(number))
    return jax.device_get((state, metrics))


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_replicas_and_microbatches_learn_the_same(agent):
    (one, rows), (many, other) = learned(agent, 1), learned(agent, 2, accumulate=2)
    for name in ("params", "target"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
            one[name],
            many[name],
        )
    np.testing.assert_allclose(rows["priority"], other["priority"], atol=1e-4)
    assert rows["priority"].shape == (8,)


def test_target_networks_follow_by_a_share():
    before = jax.device_get(AGENT.init_fn(jax.random.key(0)))
    after, _ = jax.jit(AGENT.step_fn)(before, batch_of(8), jax.random.key(0))
    due = optax.incremental_update(after["params"], before["target"], AGENT.follow)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), after["target"], due
    )


def test_a_row_drawn_twice_as_often_counts_less_by_the_exponent():
    agent = dataclasses.replace(AGENT, importance=1.0, optimizer=optax.sgd(1.0))
    before = agent.init_fn(jax.random.key(0))
    once = batch_of(4)
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), once)
    once["probability"] = jnp.full(4, 0.25)
    twice["probability"] = jnp.array([2.0, 1, 1, 1, 2]) / 5
    step = jax.jit(agent.step_fn)
    one, other = (step(before, batch, jax.random.key(0))[0] for batch in (once, twice))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        one["params"],
        other["params"],
    )


def test_it_acts_at_random_until_it_is_warm():
    variables = {"params": AGENT.init_fn(jax.random.key(0))["params"]}
    given = (variables, jnp.zeros((3, 2)), jnp.ones(3, bool), (), jax.random.key(5))
    cold, warm = (AGENT.policy(*given, steps=np.int32(n))[0] for n in (2, 3))
    explored, *_ = AGENT.net.act(
        variables["params"], *given[1:4], key=jax.random.split(given[4])[0]
    )
    np.testing.assert_array_equal(warm, explored)
    assert (np.abs(cold - explored) > 1e-3).any()


def test_whole_numbers_are_acted_at_random_until_it_is_warm():
    agent, first = AGENTS["dqn"], jnp.ones(64, bool)
    params = jax.jit(agent.net.init, static_argnums=1)(jax.random.key(0), (2,))
    params["policy"]["bias"] = jnp.array([0.0, 99.0])
    given = ({"params": params}, jnp.zeros((64, 2)), first, (), jax.random.key(5))
    policy = jax.jit(agent.policy)
    cold, warm = (policy(*given, steps=np.int32(n))[0] for n in (2, 3))
    assert cold.dtype == warm.dtype == jnp.int32
    assert 16 < cold.sum() < 48
    assert warm.sum() > 48  # 64 environments explore by 6 % on average


def test_a_loop_in_one_process_learns_from_its_table():
    table = lp.ReplayTable(100, sampler=lp.prioritised(0.6))
    make = lambda: control.Scaled(Reach())  # noqa: E731
    found = replayed.learn(
        replicator.Replicator(devices=jax.devices()[:2]),
        AGENT,
        from_gymnasium_envs([make] * 2),
        table,
        items=lp.n_step(3, discount=0.9),
        batch_size=8,
        unroll_length=4,
        steps=6,
        steps_per_call=2,
        least=10,
    )
    counts = table.statistics()
    assert found.updates == 6
    assert (counts["taken"], counts["updated"]) == (48, 48)


def test_a_later_sitting_acts_on_from_the_steps_that_were_taken(tmp_path):
    taken = []
    batches = jax.tree.map(lambda leaf: leaf[None].repeat(2, 0), batch_of(8))

    def turns(session, player):
        taken.append(player.state.steps)
        for update in session.steps():
            player.follow(session)
            player.unroll(update)
            session.step(batches)
            yield
        taken.append(player.state.steps)

    for updates in (4, 6):
        in_turn.sit(
            replicator.Replicator(1),
            AGENT,
            reach(1),
            turns,
            step_fn=AGENT.step_fn,
            steps_per_call=2,
            steps=updates,
            unroll_length=3,
            updates_per_unroll=2,
            folder=tmp_path,
            saved_every_s=1e-6,
        )
    assert taken == [0, 6, 6, 9]


class ShowsSample(OffPolicy):
    """Reports what was observed in the rows that it learns from."""

    def step_fn(self, state, batch, key):
        learned, metrics = super().step_fn(state, batch, key)
        seen = batch["trajectories"]["observation"]
        return learned, {**metrics, "sample": PerReplica(seen)}


def pendulums(warmup=3):
    """Return an agent of pendulums."""
    return ShowsSample(
        net=D4pg(action_size=1, v_min=-2.0, v_max=2.0, atoms=5, hidden=8),
        observation_shape=pendulum.OBSERVATION,
        optimizer=AGENT.optimizer,
        warmup=warmup,
    )


def anakin_after(calls):
    """Return pendulums, memory and last sample of two replicas after some calls."""
    rep = replicator.Replicator(devices=jax.devices()[:2])
    sizes = {"environments": 4, "unroll_length": 2, "capacity": 24, "batch_size": 8}
    init_fn, step_fn = anakin_replay.make_step(
        pendulums(), replicas=2, updates=2, **sizes
    )
    state, step = rep.init(init_fn, seed=0), rep.compile(step_fn)
    metrics = {}
    for number in range(calls):
        numbers = np.arange(4, dtype=np.int32)
        state, metrics = step(state, numbers, jax.random.key(number))
    poles, memory = jax.device_get(state["replayed"].value)
    return poles, memory, np.asarray(metrics["sample"])


@pytest.mark.slow
def test_anakin_keeps_a_memory_on_each_replica():
    poles, memory, _ = anakin_after(4)  # the fourth overwrites the first
    assert memory["reward"].shape == (2, 12)
    assert (memory["reward"] < 0).all()
    assert poles.age.ravel().tolist() == [8] * 4


@pytest.mark.slow
def test_each_pendulum_of_each_replica_begins_by_itself():
    _, memory, _ = anakin_after(1)
    begun = memory["observation"][:, :2].reshape(4, 3)
    assert len(np.unique(begun, axis=0)) == 4


@pytest.mark.slow
def test_each_replica_draws_rows_of_its_own_and_by_itself():
    _, memory, sample = anakin_after(3)
    rows, drawn = memory["observation"], sample.reshape(2, 4, 1, 3)
    is_it = (rows[:, None] == drawn).all(axis=-1)  # of each replica, [4, 12] places
    assert (is_it.sum(axis=-1) == 1).all()
    first, second = is_it.argmax(axis=-1).tolist()
    assert first != second


def test_each_pendulum_is_explored_by_noise_of_its_own():
    agent, key = pendulums(warmup=0), jax.random.key(0)
    alike = jax.tree.map(
        lambda leaf: jnp.repeat(leaf, 4), pendulum.reset(jax.random.split(key, 1))
    )
    play = jax.jit(functools.partial(anakin_replay.play, agent))
    _, rows, _ = play(agent.init_fn(key)["params"], alike, key, jnp.arange(1))
    assert len(np.unique(rows["observation"], axis=0)) == 1
    assert len(np.unique(rows["action"])) == 4


def reach(size, index=0):
    del index
    return from_gymnasium_envs([Reached] * size)


class Reached(control.Scaled):
    """Cut by time after five steps."""

    def __init__(self):
        super().__init__(gymnasium.wrappers.TimeLimit(Reach(), 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("d4pg", "threads"),
        *(
            pytest.param(name, launcher, marks=pytest.mark.nightly)
            for name in ("d4pg", "sac")
            for launcher in ("processes", "ray")
        ),
    ],
    indirect=["launcher"],
)
def test_a_program_learns_from_its_replay_table(name, launcher, tmp_path):
    agent = AGENTS[name]
    found = agent_program.learn(
        agent,
        functools.partial(reach, 2),
        launcher,
        actors=2,
        batch_size=8,
        unroll_length=4,
        steps=6,
        replay={"capacity": 100, "sampler": lp.prioritised(0.6)},
        items=lp.n_step(3, discount=0.9),
        evaluator=functools.partial(
            evaluator.Evaluator,
            *(reach, agent.greedy, agent.initial_core, tmp_path, 0),
        ),
        folder=tmp_path,
    )
    assert found.updates == 6
