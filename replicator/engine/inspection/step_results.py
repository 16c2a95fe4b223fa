"""What a compiled step returns, without running it: shapes and shardings."""

from typing import NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import Device, Key, PyTree
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.sharded_step import joined_metrics


class StepResults(NamedTuple):
    """Results of a step.

    Attributes:
      shapes: New state and metrics, as shapes.
      shardings: Sharding of each leaf of these.
    """

    shapes: tuple[PyTree, PyTree]
    shardings: list[NamedSharding]


def step_devices(step: CompiledStep) -> list[Device]:
    """Return the devices that a step was compiled for."""
    return list(step._layout.mesh.devices.flat)


def step_results(
    step: CompiledStep, state: PyTree, batch: PyTree, key: Key | None = None
) -> StepResults:
    """Trace a step, and return what it returns.

    Args:
      step: From `rep.compile`.
      state: Shapes of the state.
      batch: A global batch.
      key: As in a call.
    """
    outputs = step.lower(state, batch, key).out_info
    state = outputs.state.tree
    mesh = step._layout.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))
    placed = outputs._replace(
        shared=jax.tree.map(lambda _: whole, outputs.shared),
        own=jax.tree.map(lambda _: rows, outputs.own),
    )
    metrics = jax.tree.leaves(joined_metrics(placed))
    return StepResults(
        shapes=(state, joined_metrics(outputs)),
        shardings=[*step._layout.state_shardings(state), *metrics],
    )
