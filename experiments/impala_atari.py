"""Learn to play an Atari game with IMPALA.

    python -m experiments.impala_atari --game=pong --minutes=90
    python -m experiments.impala_atari --scale=program --launch_type=processes

Acting and learning in turn, in one process, or as a program of actors, queue, learner
and evaluator. It goes on from its checkpoint: a second sitting may finish what a first
began. Then 30 episodes of the policy are compared with 30 of a player that presses
buttons at random. The last line is one JSON object:

- `p_value`: of a rank test (Mann and Whitney 1947) that the policy is not better;
- `steps_per_s`: of the environments in this sitting, compilation included, and `steps`
  in all;
- `average_return` and `random_return`.

Network, loss and frames are those of Espeholt et al. 2018; the rest is chosen for 2
cores and the first million steps.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from scipy import stats

import replicator
from experiments import agent_program, config_flags, evaluator, in_turn, run_folder
from experiments.config_flags import Amount, Count, Discount, Rate, Settings, Whole
from experiments.drawing import draw_curves, draw_frames
from experiments.environments import atari
from experiments.impala import Impala
from experiments.returns import Learned, Returns
from models.impala import ActorCritic
from replicator.launchpad_bridge import acting

_SMOOTH = 30  # episodes, of the learning curve
_SAVED_EVERY_S = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      game: As ale_py writes it.
      scale: Where it runs.
      launch_type: Where the nodes of a program run.
      actors: How many nodes of a program share the games.
      torso: Of the network: shallow or deep.
      lstm: Units of its memory; 0 for none.
      minutes: Of training in this sitting, at most.
      steps: Updates in all, at most.
      environments: Games that are played at once.
      batch_size: Trajectories that an update learns from; fewer than games, so the last
        of them come from a policy some updates older.
      unroll_length: Steps of a trajectory.
      threads: That run the games.
      chunk: Images that convolutions take at once; 0 for all, on accelerators.
      learning_rate: Of Adam.
      entropy_cost: Weight of the entropy.
      discount: Of rewards, per step.
      episodes: That are played to compare the policy with chance.
      seed: Of everything.
      directory: Where checkpoints, metrics and pictures go.
    """

    game: str = "pong"
    scale: Literal["process", "program"] = "process"
    launch_type: Literal["threads", "processes", "ray"] = "processes"
    actors: Count = 2
    torso: Literal["shallow", "deep"] = "shallow"
    lstm: Whole = 0
    minutes: Rate = 60.0
    steps: Count = 1_000_000
    environments: Count = 16
    batch_size: Count = 8
    unroll_length: Count = 20
    threads: Count = 2
    chunk: Whole = 16
    learning_rate: Rate = 5e-4
    entropy_cost: Amount = 0.005
    discount: Discount = 0.99
    episodes: Count = 30
    seed: Whole = 0
    directory: str = "runs/impala_atari"


# What may differ from sitting to sitting: the state learns the same.
FREE = {
    *("launch_type", "actors", "minutes", "steps", "threads", "chunk", "episodes"),
    "directory",
}


def make_agent(config: Config) -> Impala:
    """Return the agent."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5),
        # RMSProp adds more to squares than those of such small gradients are.
        optax.adam(config.learning_rate, eps=1e-5),
    )
    return Impala(
        net=ActorCritic(
            num_actions=atari.num_actions(config.game),
            torso=config.torso,
            lstm=config.lstm,
            chunk=config.chunk,
            channels_first=True,
        ),
        observation_shape=atari.OBSERVATION,
        optimizer=optimizer,
        discount=config.discount,
        entropy_cost=config.entropy_cost,
        clip_rewards=True,
    )


def options_of(config: Config) -> dict[str, Any]:
    """Return the options of a run at any scale."""
    return {
        "batch_size": config.batch_size,
        "unroll_length": config.unroll_length,
        "steps": config.steps,
        "minutes": config.minutes,
        "seed": config.seed,
        "folder": Path(config.directory),
        "saved_every_s": _SAVED_EVERY_S,
        "directory": config.directory,
    }


def train_process(config: Config) -> Learned:
    """Act, then learn from it, and so on, from the last checkpoint on."""
    games = atari.make_games(config.game, config.environments, threads=config.threads)
    rep = replicator.Replicator()
    return in_turn.learn(rep, make_agent(config), games, **options_of(config))


def train_program(config: Config, **options: Any) -> Learned:
    """Act in some nodes, learn in another; all at once.

    Args:
      config: Of the experiment.
      **options: More of `agent_program.learn`.
    """
    return agent_program.learn(
        make_agent(config),
        functools.partial(actor_games, config),
        config.launch_type,
        actors=config.actors,
        name="impala_atari",
        **options_of(config),
        **options,
    )


def train_evaluated(config: Config) -> Learned:
    """Train as a program, with a node that plays the newest policy."""
    directory = Path(config.directory)
    Returns(directory, updates=run_folder.last_saved(directory), name=evaluator.NAME)
    agent = make_agent(config)
    return train_program(
        config,
        evaluator=functools.partial(
            evaluator.Evaluator,
            functools.partial(atari.make_games, config.game),
            agent.policy,
            agent.initial_core,
            directory,
            config.seed,
        ),
    )


def actor_games(config: Config, index: int) -> acting.VectorEnvironment:
    """Make an actor's share of the games."""
    del index  # seeds come with `reset`
    return atari.make_games(config.game, config.environments // config.actors)


SCALES = {"process": train_process, "program": train_evaluated}


def trained_player(config: Config, params: Any, *, size: int) -> evaluator.Choose:
    """Return a `choose` that draws from a policy, for so many games."""
    agent = make_agent(config)
    given = (agent.policy, agent.initial_core, params)
    return evaluator.player(*given, size=size, seed=config.seed)


def random_player(config: Config, *, size: int) -> evaluator.Choose:
    """Return a `choose` that presses buttons at random."""
    rng = np.random.default_rng(config.seed)
    buttons = atari.num_actions(config.game)
    return lambda observation, first, t: rng.integers(buttons, size=size)


def main(config: Config) -> None:
    atari.num_actions(config.game)  # there is such a game
    config_flags.check_environments(config, jax.device_count(), batch="batch_size")
    directory = Path(config.directory)
    run_folder.claim(config.directory, config, free=FREE)
    trained = SCALES[config.scale](config)
    size = config.episodes
    games = atari.make_games(config.game, size, threads=config.threads)
    chance = evaluator.play(games, random_player(config, size=size), seed=1_000_000)
    policy = trained_player(config, trained.params, size=size)
    gained = evaluator.play(games, policy, seed=2_000_000)
    watched = trained_player(config, trained.params, size=1)
    screens, total = atari.film(config.game, watched, seed=config.seed)
    draw_frames(screens, directory / "episode.png", title=f"return {total:.0f}")
    per_update = config.batch_size * config.unroll_length
    curve = [(per_update * at, gained) for at, gained in trained.returns]
    draw_curves(
        {config.game: curve},
        directory / "learning_curve.png",
        title=f"{config.game}, IMPALA, {config.torso}",
        window=_SMOOTH,
        xlabel="environment steps",
        chance=float(np.mean(chance)),
    )
    made = trained.updates - trained.begun
    test = stats.mannwhitneyu(gained, chance, alternative="greater")
    print(
        json.dumps(
            {
                "p_value": float(test.pvalue),
                "average_return": float(np.mean(gained)),
                "random_return": float(np.mean(chance)),
                "steps_per_s": per_update * made / trained.seconds,
                "steps": per_update * trained.updates,
                "game": config.game,
            }
        )
    )


if __name__ == "__main__":
    config_flags.run(main, Config)
