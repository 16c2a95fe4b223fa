"""Run a policy where its environments are, on the processor.

A policy is a pure function of a batch of n environments:

    policy(variables, observation [n, ...], first [n], core, key)
        -> (action [n, ...], extras, core)

Its key is `fold_in(fold_in(key(seed), actor's index), steps taken)`, so the random bits
do not depend on where inference runs, nor on what ran before. Where actors take no
turns, the number of the actor's start is folded in before the steps.

A policy that requires parameters of the names `index` and `steps` gets these, too: its
actor's index, and the steps that its environments have taken, int32 scalars.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from replicator.base.types import Key, PyTree

Policy: TypeAlias = Callable[..., tuple[PyTree, PyTree, PyTree]]
"""`policy(variables, observation, first, core, key) -> (action, extras, core)`; of
parameters besides these `index` and `steps` are known."""


class LocalInference:
    """Acts with variables of its own; an `Act` of `unroll`."""

    def __init__(self, policy: Policy, *, seed: int, index: int) -> None:
        """Make it; nothing is compiled before the first call.

        Args:
          policy: Pure; see the module.
          seed: Of the run.
          index: Of the actor.
        """
        self._policy = policy
        self._device = jax.local_devices(backend="cpu")[0]
        self._seed, self._index = seed, index
        self._key = actor_key(seed, index)
        self._variables: PyTree = None

    def reseed(self, start: int) -> None:
        """Draw other numbers than other starts of the same actor.

        Args:
          start: `start_number`; 0 for the key of seed and index alone.
        """
        self._key = actor_key(self._seed, self._index, start)

    def use(self, variables: PyTree) -> None:
        """Act with these from now on.

        Args:
          variables: What the policy gets; placed on the processor's device once.
        """
        self._variables = jax.device_put(variables, self._device)

    def __call__(
        self, observation: PyTree, first: np.ndarray, core: PyTree, steps: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return actions, extras and the next core; see `Act`."""
        # The first core is of the host, those after it of the device: XLA would compile
        # once for each.
        if not all(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(core)):
            core = jax.device_put(core, self._device)
        return _act(
            self._policy,
            self._variables,
            observation,
            first,
            core,
            self._key,
            np.uint32(steps),
            np.int32(self._index),
        )


def asked_by(policy: Policy, **known: Any) -> dict[str, Any]:
    """Return, of what is known by name, what a policy has parameters for."""
    required = {
        name
        for name, parameter in inspect.signature(policy).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    return {name: value for name, value in known.items() if name in required}


def actor_key(seed: int, index: int, start: int = 0) -> Key:
    """Return the random key of an actor, on the processor's device."""
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        key = jax.random.fold_in(jax.random.key(seed), index)
        key = jax.random.fold_in(key, start) if start else key
    return jax.device_put(key, device)  # and stays there


@jax.jit
def fold_steps(key: Key, steps: Any) -> jax.Array:
    """Return the data of the key for an actor's step."""
    return jax.random.key_data(jax.random.fold_in(key, steps))


@functools.partial(jax.jit, static_argnums=0)
def run_mapped(
    policy: Policy,
    variables: PyTree,
    observation: PyTree,
    first: Any,
    core: PyTree,
    key_data: Any,
    asked: dict[str, Any],
) -> tuple[PyTree, PyTree, PyTree]:
    """Run a policy for several calls at once, each with a key of its own.

    Args:
      policy: Pure; see the module.
      variables: Of all calls.
      observation: Leaves [calls, n, ...].
      first: bool [calls, n].
      core: Leaves [calls, n, ...].
      key_data: What `fold_steps` returned for each.
      asked: Of `asked_by`, int32 [calls].

    Returns:
      Actions, extras and the next core, leaves [calls, n, ...].
    """

    def act(
        observation: PyTree, first: Any, core: PyTree, data: Any, asked: dict[str, Any]
    ) -> Any:
        key = jax.random.wrap_key_data(data)
        return policy(variables, observation, first, core, key, **asked)

    return jax.vmap(act)(observation, first, core, key_data, asked)


# Of the module, not of an actor: those that are threads share what it has compiled.
@functools.partial(jax.jit, static_argnums=0)
def _act(
    policy: Policy,
    variables: PyTree,
    observation: PyTree,
    first: Any,
    core: PyTree,
    key: Key,
    steps: Any,
    index: Any,
) -> tuple[PyTree, PyTree, PyTree]:
    key = jax.random.fold_in(key, steps)
    asked = asked_by(policy, index=index, steps=steps.astype(np.int32))
    return policy(variables, observation, first, core, key, **asked)
