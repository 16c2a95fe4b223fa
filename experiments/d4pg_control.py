"""Learn continuous control with D4PG, from a replay table.

    python -m experiments.d4pg_control --env=InvertedPendulum-v5 --seeds=3
    python -m experiments.d4pg_control --env=HalfCheetah-v5 --seeds=1
    python -m experiments.d4pg_control --scale=program --launch_type=processes
    python -m experiments.d4pg_control --scale=anakin --env=pendulum

Its tasks need `jax-replicator[control]`, but for the pendulum. Scales and the last line
are those of `control_runs`.
"""

import dataclasses

from experiments import config_flags, control_runs
from experiments.config_flags import Amount, Count
from experiments.off_policy import OffPolicy
from models.d4pg import D4pg
from replicator.errors import ArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(control_runs.ControlSettings):
    """Settings of the experiment; each field is a flag.

    Attributes:
      noise: Standard deviation of exploration.
      atoms: Of the critic, whose bounds are those of the task's rewards, for ever.
    """

    noise: Amount = 0.2
    atoms: Count = 51
    directory: str = "runs/d4pg_control"


def make_agent(config: Config) -> OffPolicy:
    """Return the agent, which is the same at each scale.

    Raises:
      ArgumentError: The discount is 1.
    """
    if config.discount == 1:
        raise ArgumentError(
            "`--discount` must be below 1, as it bounds returns, got "
            f"{config.discount}. Use 0.99."
        )
    low, high = (
        each / (1 - config.discount) for each in control_runs.TASKS[config.env].rewards
    )
    net = D4pg(
        action_size=control_runs.sizes_of(config)[1],
        v_min=low,
        v_max=high,
        atoms=config.atoms,
        hidden=config.hidden,
        noise=config.noise,
    )
    return control_runs.agent_of(config, net)


def main(config: Config) -> None:
    control_runs.run(config, make_agent, "D4PG")


if __name__ == "__main__":
    config_flags.run(main, Config)
