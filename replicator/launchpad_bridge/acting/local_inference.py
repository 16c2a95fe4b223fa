"""Run a policy beside its environments, on the processor.

A policy is a pure function of a batch of n environments:

    policy(variables, observation [n, ...], first [n], core, key)
        -> (action [n, ...], extras, core)

Its key is `fold_in(fold_in(key(seed), actor's index), steps taken)`, so the random bits
do not depend on where inference runs, nor on earlier calls. Where actors take no turns,
the number of the actor's start is folded in before the steps.

A policy with required parameters `index` or `steps` gets these, too: its actor's index,
and the steps that its environments have taken, int32 scalars.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from replicator.base.types import Key, PyTree

Policy: TypeAlias = Callable[..., tuple[PyTree, PyTree, PyTree]]
"""`policy(variables, observation, first, core, key) -> (action, extras, core)`; it may
have parameters `index` and `steps` besides these."""


class LocalInference:
    """Acts with variables of its own; an `Act` of `unroll`."""

    def __init__(self, policy: Policy, *, seed: int, index: int) -> None:
        """Make it; nothing is compiled before the first call.

        Args:
          policy: Pure function; see the module.
          seed: Seed of the run.
          index: Index of the actor.
        """
        self._policy = policy
        self._device = jax.local_devices(backend="cpu")[0]
        self._seed, self._index = seed, index
        self._key = actor_key(seed, index)
        self._variables: PyTree = None

    def reseed(self, start: int) -> None:
        """Use another random key than other starts of the same actor.

        Args:
          start: `start_number`; 0 for the key of seed and index alone.
        """
        self._key = actor_key(self._seed, self._index, start)

    def use(self, variables: PyTree) -> None:
        """Act with these variables from now on.

        Args:
          variables: Argument of the policy; placed on the processor's device once.
        """
        self._variables = jax.device_put(variables, self._device)

    def __call__(
        self, observation: PyTree, first: np.ndarray, core: PyTree, steps: int
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Return actions, extras and the next core; see `Act`."""
        # The first core is on the host, later ones on the device: XLA would compile
        # for either.
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


def extra_arguments(policy: Policy, **known: Any) -> dict[str, Any]:
    """Return the values for which a policy has required parameters.

    >>> def policy(variables, observation, first, core, key, steps): ...
    >>> extra_arguments(policy, index=3, steps=20)
    {'steps': 20}
    """
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
    return jax.device_put(key, device)  # committed to it


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
    extra: dict[str, Any],
) -> tuple[PyTree, PyTree, PyTree]:
    """Run a policy for several calls at once, each with a key of its own.

    Args:
      policy: Pure function; see the module.
      variables: Variables for all calls.
      observation: Leaves [calls, n, ...].
      first: bool [calls, n].
      core: Leaves [calls, n, ...].
      key_data: Result of `fold_steps` for each call.
      extra: Result of `extra_arguments`, int32 [calls].

    Returns:
      Actions, extras and the next core, leaves [calls, n, ...].
    """

    def act(
        observation: PyTree, first: Any, core: PyTree, data: Any, extra: dict[str, Any]
    ) -> Any:
        key = jax.random.wrap_key_data(data)
        return policy(variables, observation, first, core, key, **extra)

    return jax.vmap(act)(observation, first, core, key_data, extra)


# A function of the module: actors in threads share its compilations.
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
    extra = extra_arguments(policy, index=index, steps=steps.astype(np.int32))
    return policy(variables, observation, first, core, key, **extra)
