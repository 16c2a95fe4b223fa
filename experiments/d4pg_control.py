"""Learn continuous control with D4PG, from a replay table.

    python -m experiments.d4pg_control --env=InvertedPendulum-v5 --seeds=3
    python -m experiments.d4pg_control --env=HalfCheetah-v5 --seeds=1

It needs `jax-replicator[control]`. Scales:

- `process`: acting and learning in turn, in one process; the table is that of a
  program, and stands beside the learner;
- `program`: actors, a replay table, a learner and an evaluator are nodes, in threads,
  processes or Ray.

A run that was killed goes on when it is started again; one that ended begins anew. The
last line is one JSON object: `average_return` over 10 episodes without exploration, of
the worst seed; `seconds`, of the slowest in this sitting; `steps_per_s` of environments
and of updates, which are as many.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import optax

import replicator
import replicator.launchpad_bridge as lp
from experiments import (
    agent_program,
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
from experiments.environments import control
from experiments.off_policy import OffPolicy
from experiments.returns import Learned, Returns
from models.d4pg import D4pg


class Task(NamedTuple):
    """What is known of a task.

    Attributes:
      rewards: The least and the greatest of a step, by which the critic is bounded.
      steps: Updates that are made by default.
    """

    rewards: tuple[float, float]
    steps: int


TASKS = {
    "InvertedPendulum-v5": Task((0.0, 1.0), 12_800),
    "HalfCheetah-v5": Task((-2.0, 8.0), 64_000),
    "dm_control/cartpole-swingup": Task((0.0, 1.0), 48_000),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      env: A task of gymnasium, or of the DeepMind Control Suite.
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
      noise: Standard deviation of exploration.
      warmup: Steps of each environment that act at random.
      hidden: Features of each layer.
      atoms: Of the critic.
      learning_rate: Of Adam.
      follow: Share by which target networks follow.
      discount: Of rewards, per step.
      episodes: That are played at the end.
      directory: Where a run is kept until it ends, and then drawn; nowhere if empty.
    """

    env: Literal[
        "InvertedPendulum-v5", "HalfCheetah-v5", "dm_control/cartpole-swingup"
    ] = "InvertedPendulum-v5"
    scale: Literal["process", "program"] = "process"
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
    noise: Amount = 0.2
    warmup: Whole = 500
    hidden: Count = 256
    atoms: Count = 51
    learning_rate: Rate = 3e-4
    follow: Decay = 0.005
    discount: Discount = 0.99
    episodes: Count = 10
    directory: str = "runs/d4pg_control"


def make_agent(config: Config) -> OffPolicy:
    """Return the agent, which is the same at each scale."""
    shape, action_size = control.sizes_of(config.env)
    low, high = (each / (1 - config.discount) for each in TASKS[config.env].rewards)
    return OffPolicy(
        net=D4pg(
            action_size=action_size,
            v_min=low,
            v_max=high,
            atoms=config.atoms,
            hidden=config.hidden,
            noise=config.noise,
        ),
        observation_shape=shape,
        optimizer=optax.adam(config.learning_rate),
        discount=config.discount,
        warmup=config.warmup,
        follow=config.follow,
        importance=config.importance,
    )


def run_process(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act, then learn from it, and so on."""
    table = lp.ReplayTable(
        config.capacity, sampler=lp.prioritised(config.exponent), seed=seed
    )
    return replayed.learn(
        rep,
        make_agent(config),
        control.make_tasks(config.env, config.environments),
        table,
        items=lp.n_step(config.n, discount=config.discount),
        steps_per_call=config.steps_per_call,
        least=config.least,
        **seeds.options_of(config, seed),
    )


def run_program(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act in some nodes, learn in another, evaluate in a third; all at once."""
    del rep  # the learner's node has its own
    agent, folder = make_agent(config), seeds.folder_of(config, seed)
    watch = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        begun = run_folder.last_saved(folder)
        Returns(folder, updates=begun, name=evaluator.NAME)
        watch = functools.partial(
            evaluator.Evaluator,
            functools.partial(control.make_tasks, config.env),
            agent.greedy,
            agent.initial_core,
            folder,
            seed,
        )
    made = config.environments * config.unroll_length
    per_row = config.batch_size * config.steps_per_call / made
    ahead = max(per_row * made, 8 * config.batch_size)
    return agent_program.learn(
        agent,
        functools.partial(
            control.make_tasks, config.env, config.environments // config.actors
        ),
        config.launch_type,
        actors=config.actors,
        name="d4pg_control",
        replay={
            "capacity": config.capacity,
            "sampler": lp.prioritised(config.exponent),
            "limiter": lp.RateLimiter(
                min_size=config.least, samples_per_insert=per_row, error=4 * ahead
            ),
            "seed": seed,
        },
        items=lp.n_step(config.n, discount=config.discount),
        evaluator=watch,
        **seeds.options_of(config, seed),
    )


SCALES = {"process": run_process, "program": run_program}


def main(config: Config) -> None:
    rep = replicator.Replicator()
    steps = config.steps or TASKS[config.env].steps
    config = dataclasses.replace(config, steps=steps)
    run = functools.partial(SCALES[config.scale], rep, config)
    outcomes = seeds.run_all(config, run)
    agent = make_agent(config)
    tasks = control.make_tasks(config.env, config.episodes)
    gained = evaluator.evaluated(tasks, agent.greedy, agent.initial_core, outcomes)
    per_update = config.environments * config.unroll_length / config.steps_per_call
    seeds.print_outcomes(
        config,
        outcomes,
        title=f"{config.env}, D4PG",
        replicas=rep.num_replicas,
        evaluated=gained,
        per_update=per_update,
    )


if __name__ == "__main__":
    config_flags.run(main, Config)
