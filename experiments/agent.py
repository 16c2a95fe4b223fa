"""What acts and learns: the same functions in one process, one step, and a program."""

from typing import Any, Protocol

from jax import Array

from models.impala import Core
from replicator.base.types import PyTree


class Agent(Protocol):
    """What an experiment asks of an algorithm."""

    def init_fn(self, key: Array) -> dict[str, PyTree]:
        """Make the state of an untrained agent: `params` and `opt`."""
        ...

    def initial_core(self, n: int) -> Core:
        """Return the recurrent state of n environments, for the policy."""
        ...

    def policy(
        self,
        variables: dict[str, PyTree],
        observation: Array,
        first: Array,
        core: Core,
        key: Array,
    ) -> tuple[Array, dict[str, Array], Core]:
        """Draw actions; `variables` holds `params`."""
        ...

    def step_fn(
        self, state: dict[str, PyTree], trajectories: dict[str, Any]
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Learn from trajectories, on one replica."""
        ...
