"""What all experiments with a replay table share: settings, scales, the last line.

Scales:

- `process`: acting and learning in turn, in one process; the table is that of a
  program, and stands beside the learner;
- `program`: actors, a replay table, a learner and an evaluator are nodes, in threads,
  processes or Ray;
- `anakin`: pendulums in JAX, acting, a memory on the devices and learning are one
  replicated step; for `--env=pendulum` alone. Rows are of one step, and all are drawn
  alike, from the first call on: flags that say otherwise are refused.

A run that was killed goes on when it is started again; one that ended begins anew. The
last line is one JSON object: `average_return` over 10 episodes without exploration, of
the worst seed, and `median_return` over seeds; `seconds`, of the slowest in this
sitting; `steps_per_s` of environments.
"""

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

import replicator
import replicator.launchpad_bridge as lp
from experiments import (
    agent_program,
    anakin,
    anakin_replay,
    config_flags,
    evaluator,
    replayed,
    run_folder,
    seeds,
)
from experiments.config_flags import (
    Amount,
    Count,
    Decay,
    Discount,
    Rate,
    Settings,
    Whole,
)
from experiments.drawing import draw_frames
from experiments.environments import control, pendulum
from experiments.off_policy import OffPolicy, OffPolicyNet
from experiments.returns import Learned, Returns
from replicator.errors import ArgumentError
from replicator.launchpad_bridge import acting

PENDULUM = "pendulum"
_OF_TABLES = ("least", "n", "exponent", "importance")  # not of a memory on devices
_SAMPLES_AHEAD = 8  # batches by which a program's learner may be ahead of its actors


class Task(NamedTuple):
    """What is known of a task.

    Attributes:
      rewards: The least and the greatest of a step.
      steps: Updates that are made by default.
    """

    rewards: tuple[float, float]
    steps: int


TASKS = {
    "InvertedPendulum-v5": Task((0.0, 1.0), 12_800),
    "HalfCheetah-v5": Task((-2.0, 8.0), 64_000),
    "dm_control/cartpole-swingup": Task((0.0, 1.0), 48_000),
    PENDULUM: Task(pendulum.REWARDS, 12_800),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlSettings(Settings):
    """Settings of all agents; each field is a flag, and methods are of the task.

    Attributes:
      env: A task of gymnasium or of the DeepMind Control Suite, or the pendulum in JAX.
      scale: Where it runs.
      launch_type: Where the nodes of a program run.
      actors: How many nodes of a program share the environments.
      seeds: How many runs, one after the other.
      first_seed: Of the first of them.
      steps: Updates of each; 0 for as many as the task needs.
      environments: That act at once.
      unroll_length: Steps of each in a turn.
      steps_per_call: Updates in a turn.
      batch_size: Transitions that an update learns from.
      capacity: Transitions in the table.
      least: Transitions in it before the first update.
      n: Steps of a transition.
      exponent: Of priorities; 0 draws all alike.
      importance: Exponent of importance weights.
      warmup: Steps of each environment that act at random.
      hidden: Features of each layer.
      learning_rate: Of Adam.
      follow: Share by which target networks follow.
      discount: Of rewards, per step.
      episodes: That are played at the end.
      directory: Where a run is kept until it ends, and then drawn; nowhere if empty.
    """

    env: Literal[
        "InvertedPendulum-v5",
        "HalfCheetah-v5",
        "dm_control/cartpole-swingup",
        "pendulum",
    ] = "InvertedPendulum-v5"
    scale: Literal["process", "program", "anakin"] = "process"
    launch_type: Literal["threads", "processes", "ray"] = "processes"
    actors: Count = 2
    seeds: Count = 3
    first_seed: Whole = 0
    steps: Whole = 0
    environments: Count = 4
    unroll_length: Count = 8
    steps_per_call: Count = 32
    batch_size: Count = 256
    capacity: Count = 200_000
    least: Count = 2_000
    n: Count = 3
    exponent: Amount = 0.6
    importance: Amount = 0.6
    warmup: Whole = 500
    hidden: Count = 256
    learning_rate: Rate = 3e-4
    follow: Decay = 0.005
    discount: Discount = 0.99
    episodes: Count = 10
    directory: str = "runs/control"

    def make_tasks(self, size: int) -> acting.VectorEnvironment:
        """Make so many environments."""
        return control.make_tasks(self.env, size)

    def items(self) -> acting.Items:
        """Return what makes the table's rows."""
        return lp.n_step(self.n, discount=self.discount)

    def film(
        self, choose: evaluator.Choose, *, seed: int
    ) -> tuple[list[np.ndarray], float]:
        """Return pictures of an episode, and its return."""
        return control.film(self.env, choose, seed=seed)


def sizes_of(config: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape of an observation, and the number of an action's dimensions."""
    if config.env == PENDULUM:
        return pendulum.OBSERVATION, pendulum.ACTION_SIZE
    return control.sizes_of(config.env)


def agent_of(config: Any, net: OffPolicyNet) -> OffPolicy:
    """Return the agent that acts and learns with a network."""
    return OffPolicy(
        net=net,
        observation_shape=sizes_of(config)[0],
        optimizer=optax.adam(config.learning_rate),
        discount=config.discount,
        warmup=config.warmup,
        follow=config.follow,
        importance=config.importance,
    )


def run_process(
    rep: replicator.Replicator, config: Any, agent: OffPolicy, seed: int
) -> Learned:
    """Act, then learn from it, and so on."""
    table = lp.ReplayTable(
        config.capacity, sampler=lp.prioritised(config.exponent), seed=seed
    )
    return replayed.learn(
        rep,
        agent,
        config.make_tasks(config.environments),
        table,
        items=config.items(),
        steps_per_call=config.steps_per_call,
        least=config.least,
        **seeds.options_of(config, seed),
    )


def run_program(
    rep: replicator.Replicator, config: Any, agent: OffPolicy, seed: int
) -> Learned:
    """Act in some nodes, learn in another, evaluate in a third; all at once."""
    del rep  # the learner's node has its own
    folder, watch = seeds.folder_of(config, seed), None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        begun = run_folder.last_saved(folder)
        Returns(folder, updates=begun, name=evaluator.NAME)
        watch = functools.partial(
            evaluator.Evaluator,
            config.make_tasks,
            agent.greedy,
            agent.initial_core,
            folder,
            seed,
        )
    share = config.environments // config.actors
    per_row = config.batch_size * _updates_per_step(config)
    ahead = max(_SAMPLES_AHEAD * config.batch_size, per_row * share)
    limiter = lp.RateLimiter(
        min_size=config.least,
        samples_per_insert=per_row,
        error=4 * max(ahead, per_row * share * config.unroll_length),
    )
    return agent_program.learn(
        agent,
        functools.partial(actor_tasks, config),
        config.launch_type,
        actors=config.actors,
        name="control",
        replay={
            "capacity": config.capacity,
            "sampler": lp.prioritised(config.exponent),
            "limiter": limiter,
            "seed": seed,
        },
        items=config.items(),
        # By one call, as many as a call of the table brings, where they share `steps`.
        steps_per_call=math.gcd(agent_program.SAMPLES_PER_CALL, config.steps_per_call),
        evaluator=watch,
        directory=None if folder is None else str(folder),
        **seeds.options_of(config, seed),
    )


def actor_tasks(config: Any, index: int) -> acting.VectorEnvironment:
    """Make an actor's share of the environments."""
    del index  # seeds come with `reset`
    return config.make_tasks(config.environments // config.actors)


def run_anakin(
    rep: replicator.Replicator, config: Any, agent: OffPolicy, seed: int
) -> Learned:
    """Act and learn in one compiled step, on each replica with its own pendulums."""
    init_fn, step_fn = anakin_replay.make_step(
        agent,
        replicas=rep.num_replicas,
        environments=config.environments,
        unroll_length=config.unroll_length,
        capacity=config.capacity,
        batch_size=config.batch_size,
        updates=config.steps_per_call,
    )
    found = anakin.learn(
        rep,
        init_fn,
        step_fn,
        environments=config.environments,
        steps=config.steps // config.steps_per_call,
        seed=seed,
        folder=seeds.folder_of(config, seed),
    )
    each = config.steps_per_call
    returns = [(each * call, gained) for call, gained in found.returns]
    made = {"updates": each * found.updates, "begun": each * found.begun}
    return dataclasses.replace(found, returns=returns, **made)


SCALES = {"process": run_process, "program": run_program, "anakin": run_anakin}


def check(config: Any, replicas: int) -> None:
    """Refuse flags that do not fit each other.

    Raises:
      ArgumentError: They do not.
    """
    if (config.env == PENDULUM) != (config.scale == "anakin"):
        raise ArgumentError(
            f"`--env` must be {PENDULUM} with `--scale=anakin`, and only there, got "
            f"{config.env} with {config.scale}. Use the one with the other."
        )
    shares, left_out = config_flags.check_shares, config_flags.check_left_out
    shares("batch_size", config.batch_size, replicas, "replicas")
    shares("steps", config.steps, config.steps_per_call, "`--steps_per_call`")
    if config.scale == "program":
        shares("environments", config.environments, config.actors, "actors")
    else:
        left_out(config, ("launch_type", "actors"), scales="program")
    if config.scale == "anakin":
        left_out(config, _OF_TABLES, scales="process")
        shares("environments", config.environments, replicas, "replicas")
    least, why = _least_capacity(config)
    if config.capacity < least:
        raise ArgumentError(
            f"`--capacity` must be at least {least}, {why}, got {config.capacity}. Use "
            f"{4 * least}."
        )


def run(config: Any, make_agent: Callable[[Any], OffPolicy], title: str) -> None:
    """Run all seeds, play each one's policy, and print the last line.

    Args:
      config: Of the experiment.
      make_agent: Makes its agent.
      title: Name of the agent, over the curves.
    """
    rep = replicator.Replicator()
    steps = config.steps or TASKS[config.env].steps
    config = dataclasses.replace(config, steps=steps)
    check(config, rep.num_replicas)
    agent = make_agent(config)
    outcomes = seeds.run_all(
        config, functools.partial(SCALES[config.scale], rep, config, agent)
    )
    if config.scale == "anakin":
        gained = anakin_replay.evaluated(agent, outcomes, episodes=config.episodes)
    else:
        tasks = config.make_tasks(config.episodes)
        gained = evaluator.evaluated(tasks, agent.greedy, agent.initial_core, outcomes)
    if config.directory and config.scale != "anakin":
        seed, found = next(iter(outcomes.items()))
        film(config, agent, found, seed)
    seeds.print_outcomes(
        config,
        outcomes,
        title=f"{config.env}, {title}",
        replicas=rep.num_replicas,
        evaluated=gained,
        per_update=1 / _updates_per_step(config),
    )


def film(config: Any, agent: OffPolicy, found: Learned, seed: int) -> None:
    """Draw an episode of the trained policy; print the reason where that cannot be.

    Args:
      config: Of the experiment.
      agent: Whose policy it is.
      found: What it has learned.
      seed: Of the run.
    """
    choose = evaluator.player(
        agent.greedy, agent.initial_core, found.params, size=1, seed=seed
    )
    try:
        frames, gained = config.film(choose, seed=seed)
    except Exception as error:
        # MuJoCo raises whatever its library of graphics does.
        print(f"no frames, by MUJOCO_GL={os.environ.get('MUJOCO_GL')}: {error!r}")
        return
    path = Path(config.directory) / "episode.png"
    draw_frames(frames, path, title=f"return {gained:.0f}")


def _least_capacity(config: Any) -> tuple[int, str]:
    """Return the least number of transitions that a table can hold, and why."""
    if config.scale == "anakin":
        return config.environments * config.unroll_length, "the transitions of a turn"
    calls, acting_at_once = config.steps_per_call, config.environments
    if config.scale == "program":
        calls = agent_program.SAMPLES_PER_CALL
        acting_at_once //= config.actors
    # Of the unroll before, n - 1 steps wait, for transitions that end in this one.
    unrolled = acting_at_once * (config.unroll_length + config.n - 1)
    bounds = [
        (config.least, "that of `--least`"),
        (config.batch_size * calls, f"a sample of {calls} batches"),
        (unrolled, "the transitions of an unroll"),
    ]
    return max(bounds, key=operator.itemgetter(0))


def _updates_per_step(config: Any) -> float:
    return config.steps_per_call / (config.environments * config.unroll_length)
