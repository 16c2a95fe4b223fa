"""The agent that acts and learns, its environments, and the loops that are compared.

Everything that a node of a program needs is a function of this module, or an object of
it, as these are pickled.
"""

import functools
import time
from typing import Any

import jax
import numpy as np
import optax

import replicator
import replicator.launchpad_bridge as lp
from benchmarks.actor_learner.counters import Counters
from benchmarks.actor_learner.pong import NUM_ACTIONS, SHAPE, Pong
from benchmarks.actor_learner.setup import Setup
from experiments.impala import Impala
from models.impala import ActorCritic
from replicator import hooks
from replicator.base.types import PyTree
from replicator.launchpad_bridge import acting
from replicator.launchpad_bridge.learner.published import PublishedVariables
from replicator.launchpad_bridge.trajectories.table import ActorTurn

_CHUNK = 16
_IN_FLIGHT = 2
_TAKE_S = 0.25
_MANY = 10**9


@functools.cache
def make_agent() -> Impala:
    """Return the shallow network, and what learns it."""
    return Impala(
        net=ActorCritic(num_actions=NUM_ACTIONS, torso="shallow", chunk=_CHUNK),
        observation_shape=SHAPE,
        optimizer=optax.chain(
            optax.clip_by_global_norm(40.0), optax.rmsprop(6e-4, decay=0.99, eps=0.1)
        ),
    )


def policy(*arguments: Any) -> Any:
    """Draw actions; the same function object in all actors of a process."""
    return make_agent().policy(*arguments)


def initial_core(n: int) -> PyTree:
    """Return the recurrent state of n environments: none."""
    return make_agent().initial_core(n)


def init_fn(key: jax.Array) -> PyTree:
    """Make the state of an untrained agent."""
    return make_agent().init_fn(key)


def step_fn(state: PyTree, trajectories: PyTree) -> tuple[PyTree, PyTree]:
    """Make one update of one replica."""
    return make_agent().step_fn(state, trajectories)


class CountedEnvironments:
    """Games of one actor, whose steps are counted; a `VectorEnvironment`."""

    can_snapshot = False

    def __init__(self, setup: Setup, counters: Counters, index: int) -> None:
        counters.enter(index)
        self._inner = acting.from_gymnasium_envs([Pong] * setup.environments)
        self.size = setup.environments
        self._counters, self._index = counters, index
        self._wait_s = setup.wait_s

    def reset(self, seed: int) -> acting.Step:
        """Begin new games."""
        return self._inner.reset(seed)

    def snapshot(self) -> bytes:
        """Refuse: nobody asks for it."""
        raise NotImplementedError

    def restore(self, snapshot: bytes) -> acting.Step:
        """Refuse: nobody asks for it."""
        raise NotImplementedError

    def step(self, actions: PyTree) -> acting.Step:
        """Take a step in each, and wait once for all of them if they are to."""
        self._counters.wait_for_gate(lp.stop_event())
        if self._wait_s:
            time.sleep(self._wait_s)
        started_s = time.thread_time()
        step = self._inner.step(actions)
        took_s = time.thread_time() - started_s
        self._counters.add_acted(self._index, self.size, took_s)
        return step


class Updates(hooks.Hook):
    """Counts the updates of a learner, which is the process after the actors."""

    def __init__(self, counters: Counters, process: int) -> None:
        self._counters, self._process = counters, process

    def on_state(self, event: hooks.StateEvent) -> None:
        """Count those that were made since the event before."""
        self._counters.enter(self._process)
        self._counters.add_updates(event.advanced)


class Taker:
    """A learner that takes batches and drops them; variables stay as they are."""

    thread_pool_size = 64

    def __init__(self, setup: Setup, counters: Counters) -> None:
        self._setup, self._counters = setup, counters
        counters.enter(setup.actors)
        self._queue = lp.TrajectoryQueue(4 * setup.batch_size)
        self._published = PublishedVariables()
        state = init_fn(jax.random.key(0))
        self._published.publish(0, {"params": state["params"]})

    def insert(self, trajectories: PyTree, **of_actor: Any) -> ActorTurn:
        """Take in trajectories."""
        return self._queue.insert(trajectories, **of_actor)

    def get_variables(self, names: Any = None, **which: Any) -> Any:
        """Return the variables that there are."""
        return self._published.get(names, **which)

    def run(self) -> None:
        """Take and drop until the program stops."""
        while not lp.stop_event().is_set():
            if self._queue.take(self._setup.batch_size, timeout_s=_TAKE_S):
                self._counters.add_updates(1)


def act_alone(setup: Setup, counters: Counters, index: int) -> None:
    """Step environments with the policy, and keep nothing of it, until the stop."""
    environment = CountedEnvironments(setup, counters, index)
    act = acting.LocalInference(policy, seed=0, index=index)
    act.use({"params": init_fn(jax.random.key(0))["params"]})
    step, core, steps = environment.reset(index), initial_core(environment.size), 0
    while not lp.stop_event().is_set():
        action, _, core = act(step.observation, step.first, core, steps)
        step = environment.step(np.asarray(action))
        steps += 1


def learn_alone(setup: Setup, counters: Counters) -> None:
    """Make updates from a batch that is on the device, until the program stops."""
    counters.enter(setup.actors)
    rep = replicator.Replicator(1)
    step = rep.compile(step_fn)
    state = rep.init(init_fn)
    batch = jax.device_put(made_up_batch(setup))
    waiting: list[Any] = []
    while counters.wait_for_gate(lp.stop_event()):
        state, metrics = step(state, batch)
        waiting.append(metrics["loss"])
        if len(waiting) > _IN_FLIGHT:
            jax.block_until_ready(waiting.pop(0))
        counters.add_updates(1)


def made_up_batch(setup: Setup) -> PyTree:
    """Return trajectories of the form that actors insert, with random pixels."""
    rng = np.random.default_rng(0)
    rows = (setup.batch_size, setup.unroll_length)
    seen = (setup.batch_size, setup.unroll_length + 1)
    return {
        "observation": rng.integers(0, 256, (*seen, *SHAPE), np.uint8),
        "first": np.zeros(seen, bool),
        "last": np.zeros(seen, bool),
        "action": rng.integers(0, NUM_ACTIONS, rows, np.int32),
        "reward": np.zeros(rows, np.float32),
        "discount": np.ones(rows, np.float32),
        "extras": {"logits": np.zeros((*rows, NUM_ACTIONS), np.float32)},
        "core": (),
    }


def act_then_learn(setup: Setup, counters: Counters) -> None:
    """Act and learn in turn, in one process, until the program stops."""
    environment = CountedEnvironments(setup, counters, 0)
    act = acting.LocalInference(policy, seed=0, index=0)
    state = acting.start(environment, initial_core, seed=0)
    with replicator.Replicator(1).session(
        step_fn,
        init_fn=init_fn,
        steps=_MANY,
        display=False,
        node=lp.context.get_context(),
    ) as session:
        for _ in session.steps():
            act.use({"params": session.state["params"]})
            unrolled = acting.unroll(environment, act, state, setup.unroll_length)
            assert unrolled is not None  # nothing stops it
            state = unrolled.acting
            session.step(unrolled.trajectories)
            counters.add_updates(1)
