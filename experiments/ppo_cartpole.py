"""Learn to balance a pole with PPO, in one process or as a program.

    python -m experiments.ppo_cartpole
    python -m experiments.ppo_cartpole --scale=program --launch_type=processes

The claim: an agent that replicator knows nothing of, whose step makes many updates, is
run by the parts that run IMPALA. The pole is that of gymnasium, `CartPole-v1`: a reward
for each step that it stands, of 500 at most; 475 over 100 episodes counts as solved.

A run that was killed goes on when it is started again; one that ended begins anew. The
last line is one JSON object: `average_return` over the last 100 episodes, of the worst
seed, and `seconds`, of the slowest in this sitting.
"""

import dataclasses
import functools
from typing import Literal

import gymnasium
import optax

import replicator
from experiments import agent_program, config_flags, in_turn, seeds
from experiments.config_flags import Amount, Count, Discount, Rate, Settings, Whole
from experiments.ppo import Ppo
from experiments.returns import Learned
from models.impala import ActorCritic
from replicator.launchpad_bridge import acting

FREE = seeds.FREE
_NUM_ACTIONS = 2  # to the left, to the right
_OBSERVATION = (4,)  # place, speed, angle, its speed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      scale: Where it runs.
      launch_type: Where the nodes of a program run.
      actors: How many nodes of a program share the poles.
      seeds: How many runs, one after the other.
      first_seed: Of the first of them.
      steps: Batches that are learned from, of each run.
      environments: Poles that are balanced at once.
      unroll_length: Steps of each in a batch.
      epochs: How many times a batch is learned from.
      minibatches: Parts that it is cut into, an update each.
      hidden: Features of the network.
      learning_rate: Of Adam, at the beginning; it falls to 0.
      clip: How far an update may move a probability, as a share.
      entropy_cost: Weight of the entropy.
      discount: Of rewards, per step.
      trace: The share of each later error that an advantage counts.
      directory: Where a run is kept until it ends, and then drawn; nowhere if empty.
    """

    scale: Literal["process", "program"] = "process"
    launch_type: Literal["threads", "processes", "ray"] = "threads"
    actors: Count = 2
    seeds: Count = 3
    first_seed: Whole = 0
    steps: Count = 200
    environments: Count = 16
    unroll_length: Count = 128
    epochs: Count = 4
    minibatches: Count = 4
    hidden: Count = 64
    learning_rate: Rate = 2e-3
    clip: Rate = 0.2
    entropy_cost: Amount = 0.005
    discount: Discount = 0.99
    trace: Discount = 0.95
    directory: str = "runs/ppo_cartpole"


def make_agent(config: Config) -> Ppo:
    """Return the agent, which is the same at each scale."""
    updates = config.steps * config.epochs * config.minibatches
    schedule = optax.linear_schedule(config.learning_rate, 0.0, updates)
    return Ppo(
        net=ActorCritic(num_actions=_NUM_ACTIONS, torso="mlp", hidden=config.hidden),
        observation_shape=_OBSERVATION,
        optimizer=optax.chain(
            optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5)
        ),
        epochs=config.epochs,
        minibatches=config.minibatches,
        discount=config.discount,
        trace=config.trace,
        clip=config.clip,
        entropy_cost=config.entropy_cost,
    )


def make_poles(size: int, index: int = 0) -> acting.VectorEnvironment:
    """Make so many poles, for the actor of an index."""
    del index  # seeds come with `reset`
    return acting.from_gymnasium(
        gymnasium.make_vec(
            "CartPole-v1", num_envs=size, vectorization_mode="vector_entry_point"
        )
    )


def run_process(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act, then learn from it, and so on."""
    agent, poles = make_agent(config), make_poles(config.environments)
    return in_turn.learn(rep, agent, poles, **seeds.options_of(config, seed))


def run_program(rep: replicator.Replicator, config: Config, seed: int) -> Learned:
    """Act in some nodes, learn in another; all at once."""
    del rep  # the learner's node has its own
    return agent_program.learn(
        make_agent(config),
        functools.partial(make_poles, config.environments // config.actors),
        config.launch_type,
        actors=config.actors,
        max_policy_lag=2,
        name="ppo_cartpole",
        **seeds.options_of(config, seed),
    )


SCALES = {"process": run_process, "program": run_program}


def check(config: Config, replicas: int) -> None:
    """Refuse flags that do not fit each other.

    Raises:
      ArgumentError: They do not.
    """
    config_flags.check_environments(config, replicas, batch="environments")
    length, parts = config.unroll_length, config.minibatches
    config_flags.check_shares("unroll_length", length, parts, "minibatches")


def main(config: Config) -> None:
    rep = replicator.Replicator()
    check(config, rep.num_replicas)
    run = functools.partial(SCALES[config.scale], rep, config)
    outcomes = seeds.run_all(config, run)
    seeds.print_outcomes(
        config, outcomes, title="CartPole, PPO", replicas=rep.num_replicas
    )


if __name__ == "__main__":
    config_flags.run(main, Config)
