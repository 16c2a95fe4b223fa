"""Learn to play catch with IMPALA, at several scales of one agent.

    python -m experiments.impala_catch --seeds=5
    python -m experiments.impala_catch --scale=anakin

Scales:

- `process`: acting and learning in turn, in one process and no program.
- `anakin`: environments are JAX functions, and one replicated, compiled step acts and
  learns (Hessel et al. 2021, "Podracer architectures for scalable reinforcement
  learning", §2).

The last line is one JSON object: `average_return` over the last 100 episodes, of the
worst seed, and `seconds`, of the slowest. The best is 1, a random player gets −0.6.
"""

import collections
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, logging

import replicator
from experiments import config_flags
from experiments.drawing import draw_curves, draw_frames
from experiments.environments import catch
from experiments.impala import Impala
from models.impala import ActorCritic
from replicator.launchpad_bridge import acting

_LAST = 100  # episodes, over which returns are averaged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the experiment is made of; each field is a flag.

    Attributes:
      scale: Where it runs.
      seeds: How many runs, one after the other.
      first_seed: Of the first of them.
      steps: Updates of each.
      environments: Boards that are played at once.
      unroll_length: Steps of a trajectory.
      hidden: Features of the network.
      lstm: Units of its memory; 0 for none.
      learning_rate: Of Adam, at the beginning; it falls to 0.
      entropy_cost: Weight of the entropy.
      discount: Of rewards, per step.
      directory: Where the learning curve and an episode are drawn; none if empty.
    """

    scale: Literal["process", "anakin"] = "process"
    seeds: int = 1
    first_seed: int = 0
    steps: int = 1000
    environments: int = 32
    unroll_length: int = 20
    hidden: int = 64
    lstm: int = 0
    learning_rate: float = 4e-3
    entropy_cost: float = 0.01
    discount: float = 0.99
    directory: str = "runs/impala_catch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed led to.

    Attributes:
      returns: (updates so far, return) of each episode, in order.
      seconds: From the beginning to the last update, compilation included.
      params: At the end.
    """

    returns: list[tuple[int, float]]
    seconds: float
    params: Any

    @property
    def average_return(self) -> float:
        """Of the last episodes."""
        return float(np.mean([gained for _, gained in self.returns[-_LAST:]]))


def make_agent(config: Config) -> Impala:
    """Return the agent, which is the same at each scale."""
    schedule = optax.linear_schedule(config.learning_rate, 0.0, config.steps)
    return Impala(
        net=ActorCritic(
            num_actions=catch.NUM_ACTIONS,
            torso="mlp",
            hidden=config.hidden,
            lstm=config.lstm,
        ),
        observation_shape=(catch.ROWS, catch.COLUMNS),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        discount=config.discount,
        entropy_cost=config.entropy_cost,
    )


def run_process(rep: replicator.Replicator, config: Config, seed: int) -> Outcome:
    """Act, then learn from it, and so on."""
    began, agent = time.perf_counter(), make_agent(config)
    environment = acting.from_dm_env([catch.CatchEnvironment] * config.environments)
    act = acting.LocalInference(agent.policy, seed=seed, index=0)
    state = acting.start(
        environment, agent.initial_core, seed=acting.environment_seed(seed, 0)
    )
    returns: list[tuple[int, float]] = []
    with rep.session(
        agent.step_fn,
        init_fn=agent.init_fn,
        steps=config.steps,
        seed=seed,
        display=False,
    ) as session:
        for update in session.steps():
            act.use({"params": session.state["params"]})
            unrolled = acting.unroll(environment, act, state, config.unroll_length)
            assert unrolled is not None  # nothing stops it
            state = unrolled.acting
            returns += [(update, gained) for gained in unrolled.episodes]
            session.step(unrolled.trajectories)
    return Outcome(
        returns=returns,
        seconds=time.perf_counter() - began,
        params=jax.device_get(session.result.state["params"]),
    )


def run_anakin(rep: replicator.Replicator, config: Config, seed: int) -> Outcome:
    """Act and learn in one compiled step, on each replica with its own boards."""
    began = time.perf_counter()
    init_fn, step_fn = anakin(make_agent(config), config, rep.num_replicas)
    boards = {"board": np.arange(config.environments, dtype=np.int32)}
    returns: list[tuple[int, float]] = []
    waiting: collections.deque = collections.deque()

    def note(update: int, metrics: Any) -> None:
        ended = np.asarray(metrics["ended"]).ravel()
        gained = np.asarray(metrics["gained"]).ravel()[ended]
        returns.extend((update, float(each)) for each in gained)

    with rep.session(
        step_fn, init_fn=init_fn, steps=config.steps, seed=seed, display=False
    ) as session:
        for update in session.steps():
            waiting.append((update, session.step(boards)))
            if len(waiting) > 2:  # read late: the device is not waited for
                note(*waiting.popleft())
    for each in waiting:
        note(*each)
    return Outcome(
        returns=returns,
        seconds=time.perf_counter() - began,
        params=jax.device_get(session.result.state["params"]),
    )


def anakin(agent: Impala, config: Config, replicas: int) -> tuple[Any, Any]:
    """Return `init_fn` and `step_fn` of acting and learning in one.

    The batch says which boards there are, and is cut over replicas as any other.
    Random bits follow the board, so the cut does not change what is played.

    Args:
      agent: Acts and learns.
      config: Of the experiment.
      replicas: How many share the boards.
    """
    own = config.environments // replicas

    def init_fn(key: jax.Array) -> dict[str, Any]:
        # The end of an episode, of which nobody knows: the first step begins the next.
        over = catch.reset(jax.random.split(key, own))._replace(
            first=jnp.zeros(own, bool), last=jnp.ones(own, bool)
        )
        acting = (over, agent.net.initial_core(own))
        return {**agent.init_fn(key), "acting": replicator.PerReplica(acting)}

    def step_fn(
        state: dict[str, Any], batch: dict[str, jax.Array], key: jax.Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        keys = replicator.example_keys(key, len(batch["board"]))
        trajectories, acting = _play(agent, state, keys, config.unroll_length)
        learned, metrics = agent.step_fn(
            {"params": state["params"], "opt": state["opt"]}, trajectories
        )
        metrics["gained"] = replicator.PerReplica(trajectories["reward"])
        metrics["ended"] = replicator.PerReplica(trajectories["last"][:, 1:])
        return {**learned, "acting": replicator.PerReplica(acting)}, metrics

    return init_fn, step_fn


def _play(
    agent: Impala, state: dict[str, Any], keys: jax.Array, length: int
) -> tuple[dict[str, Any], Any]:
    """Return trajectories as actors make them, and the boards and cores after."""
    boards, core = state["acting"].value

    def one(carry: Any, t: jax.Array) -> Any:
        boards, core = carry
        now = jax.vmap(jax.random.fold_in, (0, None))(keys, t)
        act_keys, board_keys = jax.vmap(jax.random.split, out_axes=1)(now)
        heads, next_core = agent.net.step(
            state["params"], boards.observation, boards.first, core
        )
        action = jax.vmap(jax.random.categorical)(act_keys, heads.logits)
        after = catch.step(boards, action.astype(jnp.int32), board_keys)
        return (after, next_core), {
            "observation": boards.observation,
            "first": boards.first,
            "last": boards.last,
            "action": action.astype(jnp.int32),
            "reward": after.reward,
            "discount": after.discount,
            "extras": {"logits": heads.logits},
        }

    steps = jnp.arange(length, dtype=jnp.int32)
    (after, next_core), rows = jax.lax.scan(one, (boards, core), steps)
    rows = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), rows)
    for name in ("observation", "first", "last"):
        end = getattr(after, name)[:, None]
        rows[name] = jnp.concatenate([rows[name], end], axis=1)
    return rows | {"core": core}, (after, next_core)


SCALES = {"process": run_process, "anakin": run_anakin}


def watch(config: Config, params: Any, seed: int) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the pictures of an episode of the trained policy, and its return so far."""
    agent, environment = make_agent(config), catch.CatchEnvironment(seed)
    core, step, gained = agent.initial_core(1), environment.reset(), 0.0
    policy, first = jax.jit(agent.policy), True
    for key in jax.random.split(jax.random.key(seed), catch.STEPS + 1):
        yield step.observation, gained
        if step.last():
            return
        action, _, core = policy(
            {"params": params}, step.observation[None], np.array([first]), core, key
        )
        step, first = environment.step(int(action[0])), False
        gained += step.reward or 0.0


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config, rep = config_flags.read(Config), replicator.Replicator()
    outcomes = {}
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        outcomes[seed] = found = SCALES[config.scale](rep, config, seed)
        print(
            f"seed {seed}: return {found.average_return:.2f} after {config.steps} "
            f"updates, {len(found.returns)} episodes, {found.seconds:.1f} s",
            flush=True,
        )
    if config.directory:
        _draw(config, outcomes)
    print(
        json.dumps(
            {
                "average_return": min(
                    each.average_return for each in outcomes.values()
                ),
                "seconds": max(each.seconds for each in outcomes.values()),
                "scale": config.scale,
                "replicas": rep.num_replicas,
                "steps": config.steps,
            }
        )
    )


def _draw(config: Config, outcomes: dict[int, Outcome]) -> None:
    directory = Path(config.directory)
    draw_curves(
        {f"seed {seed}": found.returns for seed, found in outcomes.items()},
        directory / "learning_curve.png",
        title=f"Catch, IMPALA ({config.scale})",
        window=_LAST,
    )
    seed, found = next(iter(outcomes.items()))
    frames, gained = zip(*watch(config, found.params, seed), strict=True)
    draw_frames(frames, directory / "episode.png", title=f"return {gained[-1]:.0f}")


if __name__ == "__main__":
    config_flags.define(Config)
    app.run(main)
