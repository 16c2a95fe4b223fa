"""Interface of environments for actors: several of a kind, stepped together.

An episode that has ended starts again at the *next* step (next-step autoreset, as
gymnasium's `AutoresetMode.NEXT_STEP`): the step after a last one ignores its action
and returns the first observation of the next episode. So the final observation of a
truncated episode can be bootstrapped from.

    observation   o0     o1     o2     o0     o1
    first         True   False  False  True   False
    last          False  False  True   False  False
    reward               r1     r2     0      r1        of the transition to it
    discount             1      0|1    0      1         0 where the episode terminated

Adapters: `from_gymnasium` (`vector_env.py`); `from_gymnasium_envs` and `from_dm_env`
(`serial_environments.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from replicator import rpc
from replicator.base.types import PyTree
from replicator.errors import ArgumentError, ReplicatorError


@rpc.register
class EnvironmentFailedError(ReplicatorError, RuntimeError):
    """An environment raised; the message names the actor."""


class Step(NamedTuple):
    """Observations of n environments, and the transitions to them.

    Attributes:
      observation: Leaves [n, ...].
      reward: float32 [n], of the transition to here; 0 at a first step.
      discount: float32 [n], of the transition to here: 0 where the episode terminated
        by it and at a first step, 1 otherwise, also where the episode was truncated.
      first: bool [n], whether an episode starts here.
      last: bool [n], whether an episode ends here.
    """

    observation: PyTree
    reward: np.ndarray
    discount: np.ndarray
    first: np.ndarray
    last: np.ndarray


class VectorEnvironment(Protocol):
    """Several environments that are stepped together, with next-step autoreset.

    Attributes:
      size: Number of environments.
      can_snapshot: Whether `snapshot` and `restore` can be called.
    """

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def can_snapshot(self) -> bool: ...  # noqa: D102

    def reset(self, seed: int) -> Step:
        """Begin new episodes; the same for the same seed, also in another process.

        Args:
          seed: 0 to 2**31 - 1.

        Returns:
          Their first step: reward and discount are 0.
        """
        ...

    def step(self, actions: PyTree) -> Step:
        """Take a step in each; one that was at its last begins anew.

        Args:
          actions: Leaves [n, ...].

        Returns:
          Their next step. Its arrays are not written to again.
        """
        ...

    def snapshot(self) -> bytes:
        """Return all state that later steps depend on; raise if not `can_snapshot`."""
        ...

    def restore(self, snapshot: bytes) -> Step:
        """Go back to a snapshot of this object, or of one made by the same arguments.

        Returns:
          The step that was the latest then.
        """
        ...


def first_step(observation: PyTree, size: int) -> Step:
    """Return the step at which `size` episodes begin.

    >>> step = first_step(np.zeros((2, 4)), size=2)
    >>> step.first, step.reward
    (array([ True,  True]), array([0., 0.], dtype=float32))
    """
    return Step(
        observation,
        np.zeros(size, np.float32),
        np.zeros(size, np.float32),
        np.ones(size, bool),
        np.zeros(size, bool),
    )


def with_infos(
    observation: PyTree, infos: Mapping[str, Any], names: Sequence[str]
) -> PyTree:
    """Return the observation for a policy, with these values of gymnasium's infos.

    Args:
      observation: Observation of one environment or of several.
      infos: Its infos.
      names: Names of the values; without any the observation is unchanged.

    Raises:
      ArgumentError: The infos lack a name, of one environment or more.

    >>> with_infos(0.5, {"lives": 3}, ["lives"])
    {'observation': 0.5, 'info': {'lives': array(3)}}
    """
    for name in names:
        if name not in infos or not np.all(infos.get(f"_{name}", True)):
            known = ", ".join(key for key in infos if not key.startswith("_"))
            raise ArgumentError(
                f"`infos` must name values present at every step, got {name!r}; "
                f"present: {known or 'nothing'}. Return it from the environment, also "
                "from `reset`."
            )
    if not names:
        return observation
    info = {name: np.asarray(infos[name]) for name in names}
    return {"observation": observation, "info": info}
