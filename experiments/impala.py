"""IMPALA: actors act by policies a little old, a learner corrects for it by V-trace.

Espeholt et al. 2018, "IMPALA: Scalable distributed deep-RL with importance weighted
actor-learner architectures". What the agent is, and nothing of where it runs: the same
functions act and learn in one process, in one compiled step, and in a program.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import replicator
from models.impala import ActorCritic, Core
from models.losses import transitions_of, vtrace_loss
from replicator.base.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Impala:
    """The agent.

    Attributes:
      net: What acts and learns.
      observation_shape: Of one observation.
      optimizer: Not wrapped.
      discount: Of rewards, per step.
      entropy_cost: Weight of the entropy.
      baseline_cost: Weight of the values' loss.
      clip_rewards: Whether to learn from rewards cut to [-1, 1].
    """

    net: ActorCritic
    observation_shape: tuple[int, ...]
    optimizer: optax.GradientTransformation
    discount: float = 0.99
    entropy_cost: float = 0.01
    baseline_cost: float = 0.5
    clip_rewards: bool = False

    def init_fn(self, key: Array) -> dict[str, PyTree]:
        """Make the state of an untrained agent: `params` and `opt`."""
        params = self.net.init(key, self.observation_shape)
        return {"params": params, "opt": self._optimizer().init(params)}

    def initial_core(self, n: int) -> Core:
        """Return the recurrent state of n environments, for the policy."""
        return jax.tree.map(np.asarray, self.net.initial_core(n))

    def policy(
        self,
        variables: dict[str, PyTree],
        observation: Array,
        first: Array,
        core: Core,
        key: Array,
    ) -> tuple[Array, dict[str, Array], Core]:
        """Draw actions; `variables` holds `params`. See `ActorCritic.act`."""
        return self.net.act(variables["params"], observation, first, core, key)

    def step_fn(
        self, state: dict[str, PyTree], trajectories: dict[str, Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from trajectories: one update, of one replica."""
        (loss, metrics), grads = replicator.value_and_grad(self._loss, has_aux=True)(
            state["params"], trajectories
        )
        updates, opt = self._optimizer().update(
            grads, state["opt"], state["params"], count=loss.weight
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss, **metrics}

    def _loss(self, params: PyTree, trajectories: dict[str, Any]) -> Any:
        heads = self.net.unroll(
            params,
            trajectories["observation"],
            trajectories["first"],
            trajectories["core"],
        )
        done = transitions_of(trajectories)
        if self.clip_rewards:
            done = done._replace(reward=jnp.clip(done.reward, -1.0, 1.0))
        return vtrace_loss(
            heads.logits,
            heads.value,
            done,
            discount=self.discount,
            entropy_cost=self.entropy_cost,
            baseline_cost=self.baseline_cost,
        )

    def _optimizer(self) -> optax.GradientTransformationExtraArgs:
        return replicator.wrap_optimizer(self.optimizer)
