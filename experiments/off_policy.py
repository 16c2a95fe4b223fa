"""Agents that learn from samples of a replay table: their network says what.

D4PG, SAC and DQN are the same agent, with another network: `models.d4pg`,
`models.sac`, `models.dqn`. Actions are in [-1, 1], or whole numbers below their number.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

from experiments.agent import Agent, Net
from models.d4pg import Losses
from models.impala import Core
from replicator import Concat, LocalSum, Mean, example_keys, is_last_microbatch
from replicator.base.types import PyTree


class OffPolicyNet(Net, Protocol):
    """What acts, and learns from transitions; `D4pg` has the docstrings."""

    @property
    def action_size(self) -> int: ...  # noqa: D102

    def best(self, params: PyTree, observation: Any) -> Array: ...  # noqa: D102

    def losses(  # noqa: D102
        self, params: PyTree, target: PyTree, rows: dict[str, Any], keys: Array
    ) -> Losses: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicy(Agent):
    """The agent.

    Attributes:
      net: What acts and learns.
      warmup: Steps of each environment that act at random.
      follow: The share by which target networks follow at each update.
      importance: The exponent by which rows drawn too often count less; 1 for all of
        it (Schaul et al. 2016, "Prioritized experience replay", §3.4).
    """

    net: OffPolicyNet
    warmup: int = 0
    follow: float = 0.005
    importance: float = 0.6

    def init_fn(self, key: Array) -> dict[str, PyTree]:
        """Make the state of an untrained agent: `params`, `target` and `opt`."""
        state = Agent.init_fn(self, key)
        return {**state, "target": jax.tree.map(jnp.copy, state["params"])}

    # Its parameter `steps` is filled in by who acts.
    def policy(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        variables: dict[str, PyTree],
        observation: Array,
        first: Array,
        core: Core,
        key: Array,
        steps: Array,
    ) -> tuple[Array, dict[str, Array], Core]:
        """Explore; at random to begin with."""
        act_key, random_key = jax.random.split(key)
        params = variables["params"]
        action, extras, core = self.net.act(params, observation, first, core, act_key)
        if jnp.issubdtype(action.dtype, jnp.integer):
            size = self.net.action_size
            chance = jax.random.randint(random_key, action.shape, 0, size)
        else:
            chance = jax.random.uniform(random_key, action.shape, minval=-1.0)
        return jnp.where(steps < self.warmup, chance, action), extras, core

    def greedy(
        self,
        variables: dict[str, PyTree],
        observation: Array,
        first: Array,
        core: Core,
        key: Array,
    ) -> tuple[Array, dict[str, Array], Core]:
        """Act without exploring."""
        del first, key
        return self.net.best(variables["params"], observation), {}, core

    # A sample comes with probabilities, and SAC learns by chance.
    def step_fn(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: dict[str, PyTree], batch: dict[str, Any], key: Array
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from a sample, on one replica; `priority` is a row per example."""
        # Divided by their sum, so only their ratios matter.
        weight = batch["probability"] ** -self.importance
        keys = example_keys(key, len(weight))

        def loss_fn(params: PyTree) -> Any:
            found = self.net.losses(
                params, state["target"], batch["trajectories"], keys
            )
            metrics: dict[str, Any] = {
                name: Mean((weight * each).sum() / weight.sum(), weight=weight.sum())
                for name, each in found.metrics.items()
            }
            metrics["priority"] = Concat(found.priority)
            return LocalSum((weight * found.loss).sum(), weight.sum()), metrics

        learned, metrics = self.update(state, loss_fn)
        moved = optax.incremental_update(
            learned["params"], state["target"], self.follow
        )
        target = jax.tree.map(
            lambda new, old: jnp.where(is_last_microbatch(), new, old),
            moved,
            state["target"],
        )
        return {**learned, "target": target}, metrics
