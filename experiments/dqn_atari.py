"""Learn an Atari game with DQN: the agent of `d4pg_control`, by another network.

    python -m experiments.dqn_atari --env=road_runner
    python -m experiments.dqn_atari --scale=program --launch_type=processes

Games, pictures and the network for them are those of `impala_atari`; scales and the
last line are those of `control_runs`. The evaluator, and the episodes at the end, take
the best action always.

Pictures stay uint8 from the game to the devices, where the network divides them. A row
holds the four pictures of an observation and the four n steps later, 56 kB: so
`--capacity=20000` takes 1.1 GB. With n = 3 only one picture of the eight is in both, so
nothing is gained by joining them; that rows share pictures with each other too, as in a
buffer of single frames, a table of whole rows cannot have.

A game cut by time is bootstrapped from; a life that is lost ends no episode.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import optax

from experiments import config_flags, control_runs, evaluator
from experiments.config_flags import Amount, Count, Decay, Discount, Rate, Whole
from experiments.environments import atari
from experiments.off_policy import OffPolicy
from models.dqn import Dqn
from models.impala import ActorCritic
from replicator.launchpad_bridge import acting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(control_runs.ControlSettings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      env: A game, as ale_py writes it.
      torso: Of the network: shallow, deep, or mlp.
      chunk: Images that convolutions take at once; 0 for all.
      epsilon: Probability of a random action where most are.
      alpha: By how much less other environments explore; see `Dqn`.
    """

    env: str = "kung_fu_master"  # pyright: ignore[reportIncompatibleVariableOverride]
    scale: Literal["process", "program"] = "process"
    torso: Literal["shallow", "deep", "mlp"] = "shallow"
    chunk: Whole = 0
    epsilon: Discount = 0.4
    alpha: Amount = 7.0
    seeds: Count = 1
    steps: Count = 2_000
    environments: Count = 8
    unroll_length: Count = 1
    steps_per_call: Count = 1  # a loop around convolutions is slow on a CPU
    batch_size: Count = 32
    capacity: Count = 20_000
    least: Count = 1_000
    warmup: Whole = 100
    learning_rate: Rate = 3e-4
    follow: Decay = 0.01
    directory: str = "runs/dqn_atari"

    def make_tasks(self, size: int) -> acting.VectorEnvironment:
        """Make so many games."""
        return atari.make_games(self.env, size)

    def items(self) -> acting.Items:
        """Return what makes rows, of rewards cut to [-1, 1]."""
        made = super().items()
        return dataclasses.replace(made, rows_of=functools.partial(_cut, made.rows_of))

    def film(
        self, choose: evaluator.Choose, *, seed: int
    ) -> tuple[list[np.ndarray], float]:
        """Return the screens of a game, and its return."""
        return atari.film(self.env, choose, seed=seed)


def make_agent(config: Config) -> OffPolicy:
    """Return the agent, which is the same at each scale."""
    network = ActorCritic(
        num_actions=atari.num_actions(config.env),
        torso=config.torso,
        hidden=config.hidden,
        chunk=config.chunk,
        channels_first=True,
    )
    return OffPolicy(
        net=Dqn(network=network, epsilon=config.epsilon, alpha=config.alpha),
        observation_shape=atari.OBSERVATION,
        optimizer=optax.adam(config.learning_rate, eps=1e-4),
        discount=config.discount,
        warmup=config.warmup,
        follow=config.follow,
        importance=config.importance,
    )


def _cut(rows_of: Callable[..., Any], steps: dict[str, Any], places: Any) -> Any:
    return rows_of({**steps, "reward": np.clip(steps["reward"], -1.0, 1.0)}, places)


def main(config: Config) -> None:
    control_runs.run(config, make_agent, "DQN")


if __name__ == "__main__":
    config_flags.run(main, Config)
