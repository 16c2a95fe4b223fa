"""Learn continuous control with SAC: the agent of `d4pg_control`, by another network.

    python -m experiments.sac_control --env=InvertedPendulum-v5 --seeds=3

Its tasks need `jax-replicator[control]`, but for the pendulum. Scales and the last line
are those of `control_runs`. All rows are drawn alike, of one step each.
"""

import dataclasses

from experiments import config_flags, control_runs
from experiments.config_flags import Amount, Count
from experiments.off_policy import OffPolicy
from models.sac import Sac


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(control_runs.ControlSettings):
    """Settings of the experiment; each field is a flag."""

    n: Count = 1
    exponent: Amount = 0.0
    directory: str = "runs/sac_control"


def make_agent(config: Config) -> OffPolicy:
    """Return the agent, which is the same at each scale."""
    action_size = control_runs.sizes_of(config)[1]
    net = Sac(action_size=action_size, hidden=config.hidden)
    return control_runs.agent_of(config, net)


def main(config: Config) -> None:
    control_runs.run(config, make_agent, "SAC")


if __name__ == "__main__":
    config_flags.run(main, Config)
