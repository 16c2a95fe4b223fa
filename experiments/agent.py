"""An agent: the same functions in one process, one step, and a program.

An algorithm is an `Agent` with a `step_fn` of its own: what it learns from, and how
often. `in_turn`, `agent_program` and the experiments decide where it runs.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax import Array

import replicator
from models.impala import Core
from replicator.base.types import PyTree


class Net(Protocol):
    """What an agent acts with; `ActorCritic` has the docstrings."""

    def init(self, key: Array, observation_shape: tuple[int, ...]) -> PyTree: ...  # noqa: D102

    def initial_core(self, n: int) -> Core: ...  # noqa: D102

    def act(  # noqa: D102
        self, params: PyTree, observation: Any, first: Array, core: Core, key: Array
    ) -> tuple[Array, dict[str, Array], Core]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent(abc.ABC):
    """An actor and a critic.

    Attributes:
      net: What acts and learns.
      observation_shape: Of one observation.
      optimizer: Not wrapped.
      discount: Of rewards, per step.
    """

    net: Net
    observation_shape: tuple[int, ...]
    optimizer: optax.GradientTransformation
    discount: float = 0.99

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
        """Draw actions; `variables` holds `params`. See `Net`."""
        return self.net.act(variables["params"], observation, first, core, key)

    @abc.abstractmethod
    def step_fn(
        self, state: dict[str, PyTree], trajectories: dict[str, Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from trajectories, on one replica."""

    def update(
        self, state: dict[str, PyTree], loss_fn: Callable[[PyTree], Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Make one update.

        Args:
          state: As of `init_fn`.
          loss_fn: Returns, of the parameters, a `LocalSum` and metrics.
        """
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
