"""Run a step as one replica on the whole global batch, in plain Python.

No `jit`, no `shard_map`: outside `grad` every value is concrete, so `print`, `pdb` and
`float(x)` work. Under accumulation, too, the step runs once, on all examples: effects
of microbatches can only be seen in a traced step. It needs one device's memory for the
whole batch, and is slow.
"""

from typing import NoReturn

import jax
import jax.numpy as jnp

from replicator.base.number_lists import lists_as_arrays
from replicator.base.padded import unpadded
from replicator.base.per_replica import is_per_replica
from replicator.base.tracebacks import short_tracebacks
from replicator.base.trees import named_leaves
from replicator.base.types import Key, PyTree
from replicator.engine.require_eager import in_no_mesh
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.errors import ArgumentError
from replicator.inputs.placement import Placed


@short_tracebacks
class DebugStep:
    """An eager step: `state, metrics = step(state, batch[, key])`.

    Args:
      update: A lifted step of one replica, without accumulation.
      accumulate: Microbatches that a `Placed` batch is cut into.
    """

    def __init__(self, update: KeyedStep, *, accumulate: int) -> None:
        self._update = update
        self._accumulate = accumulate

    @in_no_mesh
    def __call__(
        self, state: PyTree, batch: PyTree, key: Key | None = None
    ) -> tuple[PyTree, PyTree]:
        """Make one update from one global batch; nothing is donated.

        Args:
          state: As in a compiled step, without `PerReplica` leaves.
          batch: Leaves [global_batch, ...], or a `Placed` batch.
          key: A random key if `step_fn` takes one.

        Returns:
          The new state and the metrics.

        Raises:
          ArgumentError: The state has `PerReplica` leaves.
        """
        _refuse_per_replica(state)
        placed = isinstance(batch, Placed)
        value = (
            jax.tree.map(self._join, batch.value)
            if placed
            else lists_as_arrays(batch, name="batch")
        )
        # Off the mesh: one replica sees plain arrays.
        given = unpadded(jax.device_get((state, value, key)))
        plain = jax.tree.map(jnp.asarray, given)
        return self._update(*plain)

    def inspect(self, *_: PyTree, saves: bool = False) -> NoReturn:
        """Refuse the call: no compiler has seen this step.

        Raises:
          ArgumentError: Always.
        """
        raise ArgumentError(
            "`step` must be compiled to be inspected, got one with `debug=True`. Pass "
            "the `step_fn` itself."
        )

    def _join(self, leaf: jax.Array) -> jax.Array:
        return leaf if self._accumulate == 1 else leaf.reshape(-1, *leaf.shape[2:])


def _refuse_per_replica(state: PyTree) -> None:
    for path, node in named_leaves(state, is_leaf=is_per_replica):
        if is_per_replica(node):
            raise ArgumentError(
                "`debug` must be False for a state with `PerReplica` leaves, got "
                f"`{path}`. Debug on `Replicator(num_replicas=1)` instead."
            )
