"""PPO: what was played is learned from some times over, a part at a time.

Schulman et al. 2017, "Proximal policy optimization algorithms". What the agent is, and
nothing of where it runs, as in `experiments.impala`. A step of the learner is all that
is made of one batch: `epochs` times `minibatches` updates of the optimizer.

A minibatch is every so many steps of all environments. So each replica has its share of
each, and the number of replicas changes nothing.
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
from models.losses import transitions_of
from models.ppo_loss import Steps, ppo_loss, steps_of
from replicator.base.types import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo:
    """The agent.

    Attributes:
      net: What acts and learns; without memory, as steps are learned from one by one.
      observation_shape: Of one observation.
      optimizer: Not wrapped.
      epochs: How many times a batch is learned from.
      minibatches: Parts that it is cut into.
      discount: Of rewards, per step.
      trace: The share of each later error that counts.
      clip: How far a probability may move, as a share.
      entropy_cost: Weight of the entropy.
      baseline_cost: Weight of the values' loss.
    """

    net: ActorCritic
    observation_shape: tuple[int, ...]
    optimizer: optax.GradientTransformation
    epochs: int = 4
    minibatches: int = 4
    discount: float = 0.99
    trace: float = 0.95
    clip: float = 0.2
    entropy_cost: float = 0.01
    baseline_cost: float = 0.5

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
        """Learn from trajectories, on one replica."""
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
            return self._update(state, *jax.tree.map(lambda leaf: leaf[part], parts))

        order = jnp.tile(jnp.arange(self.minibatches), self.epochs)
        state, metrics = jax.lax.scan(update, state, order)
        return state, jax.tree.map(lambda leaf: leaf[-1], metrics)

    def _parts(self, leaf: Array) -> Array:
        """Return every so many steps, [minibatches, b, t / minibatches, ...]."""
        b, _, *rest = leaf.shape
        return jnp.moveaxis(leaf.reshape(b, -1, self.minibatches, *rest), 2, 0)

    def _update(
        self, state: dict[str, PyTree], rows: dict[str, Array], steps: Steps
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        def loss_fn(params: PyTree) -> Any:
            heads = self.net.unroll(params, rows["observation"], rows["first"], ())
            return ppo_loss(
                heads.logits,
                heads.value,
                steps,
                clip=self.clip,
                entropy_cost=self.entropy_cost,
                baseline_cost=self.baseline_cost,
            )

        (loss, metrics), grads = replicator.value_and_grad(loss_fn, has_aux=True)(
            state["params"]
        )
        updates, opt = self._optimizer().update(
            grads, state["opt"], state["params"], count=loss.weight
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": loss, **metrics}

    def _optimizer(self) -> optax.GradientTransformationExtraArgs:
        return replicator.wrap_optimizer(self.optimizer)
