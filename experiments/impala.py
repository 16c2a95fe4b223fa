"""IMPALA: actors act by policies a little old, a learner corrects for it by V-trace.

Espeholt et al. 2018, "IMPALA: Scalable distributed deep-RL with importance weighted
actor-learner architectures".
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from experiments.agent import Agent
from models.impala import ActorCritic
from models.losses import transitions_of, vtrace_loss
from replicator.base.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Impala(Agent):
    """The agent.

    Attributes:
      net: What acts and learns.
      entropy_cost: Weight of the entropy.
      baseline_cost: Weight of the values' loss.
      clip_rewards: Whether to learn from rewards cut to [-1, 1].
    """

    net: ActorCritic
    entropy_cost: float = 0.01
    baseline_cost: float = 0.5
    clip_rewards: bool = False

    def step_fn(
        self, state: dict[str, PyTree], trajectories: dict[str, Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from trajectories: one update, of one replica."""
        done = transitions_of(trajectories)
        if self.clip_rewards:
            done = done._replace(reward=jnp.clip(done.reward, -1.0, 1.0))

        def loss_fn(params: PyTree) -> Any:
            observation, first = trajectories["observation"], trajectories["first"]
            heads = self.net.unroll(params, observation, first, trajectories["core"])
            return vtrace_loss(
                heads.logits,
                heads.value,
                done,
                discount=self.discount,
                entropy_cost=self.entropy_cost,
                baseline_cost=self.baseline_cost,
            )

        return self.update(state, loss_fn)
