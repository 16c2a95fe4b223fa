"""Learn to play catch with IMPALA, at several scales of one agent.

    python -m experiments.impala_catch --seeds=5
    python -m experiments.impala_catch --scale=anakin
    python -m experiments.impala_catch --scale=program --launch_type=processes

Scales:

- `process`: acting and learning in turn, in one process and no program.
- `anakin`: environments are JAX functions, and one replicated, compiled step acts and
  learns (Hessel et al. 2021, "Podracer architectures for scalable reinforcement
  learning", §2);
- `program`: actors, a queue and a learner are nodes, in threads, processes or Ray.

A run that was killed goes on when it is started again; one that ended begins anew. The
last line is one JSON object: `average_return` over the last 100 episodes, of the worst
seed, and `seconds`, of the slowest in this sitting. The best is 1, a random player gets
−0.6.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicator
from experiments import agent_program, anakin, config_flags, in_turn, seeds
from experiments.config_flags import Amount, Count, Discount, Rate, Settings, Whole
from experiments.drawing import draw_frames
from experiments.environments import catch
from experiments.impala import Impala
from experiments.returns import Learned
from models.impala import ActorCritic
from replicator.launchpad_bridge import acting

FREE = seeds.FREE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      scale: Where it runs.
      launch_type: Where the nodes of a program run.
      actors: How many nodes of a program share the boards.
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
      directory: Where a run is kept until it ends, and then drawn; nowhere if empty.
    """

    scale: Literal["process", "anakin", "program"] = "process"
    launch_type: Literal["threads", "processes", "ray"] = "threads"
    actors: Count = 2
    seeds: Count = 1
    first_seed: Whole = 0
    steps: Count = 1000
    environments: Count = 32
    unroll_length: Count = 20
    hidden: Count = 64
    lstm: Whole = 0
    learning_rate: Rate = 4e-3
    entropy_cost: Amount = 0.01
    discount: Discount = 0.99
    directory: str = "runs/impala_catch"


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


def run_process(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act, then learn from it, and so on."""
    agent, boards = make_agent(config), make_boards(config.environments)
    return in_turn.learn(rep, agent, boards, **seeds.options_of(config, seed))


def run_anakin(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act and learn in one compiled step, on each replica with its own boards."""
    init_fn, step_fn = anakin_step(make_agent(config), config, rep.num_replicas)
    return anakin.learn(
        rep,
        init_fn,
        step_fn,
        environments=config.environments,
        steps=config.steps,
        seed=seed,
        folder=seeds.folder_of(config, seed),
    )


def anakin_step(agent: Impala, config: Config, replicas: int) -> tuple[Any, Any]:
    """Return `init_fn` and `step_fn` of acting and learning in one.

    The batch holds seeds of boards, and is cut over replicas as any other.
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
        state: dict[str, Any], boards: jax.Array, key: jax.Array
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        keys = replicator.example_keys(key, len(boards))
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


def run_program(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act in some nodes, learn in another; all at once."""
    del rep  # the learner's node has its own
    return agent_program.learn(
        make_agent(config),
        functools.partial(make_boards, config.environments // config.actors),
        config.launch_type,
        actors=config.actors,
        name="impala_catch",
        **seeds.options_of(config, seed),
    )


def make_boards(size: int, index: int = 0) -> acting.VectorEnvironment:
    """Make so many boards, for the actor of an index."""
    del index  # seeds come with `reset`
    return acting.from_dm_env([catch.CatchEnvironment] * size)


SCALES = {"process": run_process, "anakin": run_anakin, "program": run_program}


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


def main(config: Config) -> None:
    rep = replicator.Replicator()
    config_flags.check_environments(config, rep.num_replicas, batch="environments")
    run = functools.partial(SCALES[config.scale], rep, config)
    outcomes = seeds.run_all(config, run)
    if config.directory:
        seed, found = next(iter(outcomes.items()))
        frames, gained = zip(*watch(config, found.params, seed), strict=True)
        path = Path(config.directory) / "episode.png"
        draw_frames(frames, path, title=f"return {gained[-1]:.0f}")
    seeds.print_outcomes(
        config,
        outcomes,
        title="Catch, IMPALA",
        replicas=rep.num_replicas,
        chance=catch.CHANCE,
    )


if __name__ == "__main__":
    config_flags.run(main, Config)
