"""PPO: what was played is learned from some times over, a part at a time.

Schulman et al. 2017, "Proximal policy optimization algorithms". A step of the learner
is all that is made of one batch: `epochs` times `minibatches` updates of the optimizer.

A minibatch is every so many steps of all environments. So each replica has its share of
each, and the number of replicas changes nothing.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.agent import Agent
from models.impala import ActorCritic
from models.losses import transitions_of
from models.ppo_loss import Steps, ppo_loss, steps_of
from replicator.base.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(Agent):
    """The agent; its network has no memory, as steps are learned from one by one.

    Attributes:
      net: What acts and learns.
      entropy_cost: Weight of the entropy.
      baseline_cost: Weight of the values' loss.
      epochs: How many times a batch is learned from.
      minibatches: Parts that it is cut into.
      trace: The share of each later error that counts.
      clip: How far a probability may move, as a share.
    """

    net: ActorCritic
    entropy_cost: float = 0.01
    baseline_cost: float = 0.5
    epochs: int = 4
    minibatches: int = 4
    trace: float = 0.95
    clip: float = 0.2

    def step_fn(
        self, state: dict[str, PyTree], trajectories: dict[str, Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from trajectories, on one replica; metrics are of the last update."""
        observation, first = trajectories["observation"], trajectories["first"]
        heads = self.net.unroll(
            state["params"], observation, first, trajectories["core"]
        )
        steps = steps_of(
            heads.value,
            transitions_of(trajectories),
            discount=self.discount,
            trace=self.trace,
        )
        rows = {"observation": observation[:, :-1], "first": first[:, :-1]}
        parts = jax.tree.map(self._parts, (rows, steps))

        def update(state: dict[str, PyTree], part: Array) -> tuple[Any, Any]:
            rows, steps = jax.tree.map(lambda leaf: leaf[part], parts)
            return self.update(state, lambda params: self._loss(params, rows, steps))

        order = jnp.tile(jnp.arange(self.minibatches), self.epochs)
        state, metrics = jax.lax.scan(update, state, order)
        return state, jax.tree.map(lambda leaf: leaf[-1], metrics)

    def _parts(self, leaf: Array) -> Array:
        """Return every so many steps, [minibatches, b, t / minibatches, ...]."""
        b, _, *rest = leaf.shape
        return jnp.moveaxis(leaf.reshape(b, -1, self.minibatches, *rest), 2, 0)

    def _loss(self, params: PyTree, rows: dict[str, Array], steps: Steps) -> Any:
        heads = self.net.unroll(params, rows["observation"], rows["first"], ())
        return ppo_loss(
            heads.logits,
            heads.value,
            steps,
            clip=self.clip,
            entropy_cost=self.entropy_cost,
            baseline_cost=self.baseline_cost,
        )
