"""What a compiled step takes and returns, and its program, without running it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicator.base.flat_tree import FlatTree
from replicator.base.mesh import REPLICA_AXIS
from replicator.base.types import Device, Key, PyTree
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.sharded_step import joined_metrics
from replicator.errors import ArgumentError
from replicator.inputs.placement import batch_axis, placed_shapes


class StepResults(NamedTuple):
    """Results of a step.

    Attributes:
      shapes: New state and metrics, as shapes.
      shardings: Sharding of each leaf of these.
    """

    shapes: tuple[PyTree, PyTree]
    shardings: list[NamedSharding]


class StepProgram(NamedTuple):
    """The program of a step, to be traced and sent to other devices.

    Attributes:
      run: Takes what the step takes, and returns what it returns.
      inputs: Sharding of each leaf of its arguments.
    """

    run: Callable[..., tuple[PyTree, PyTree]]
    inputs: list[NamedSharding]


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


def step_program(
    step: CompiledStep, state: PyTree, batch: PyTree, key: Key | None = None
) -> StepProgram:
    """Return the program of a step; it is the same on as many other devices.

    Args:
      step: From `rep.compile`.
      state: Shapes of the state.
      batch: Shapes of a global batch.
      key: Shape of the key.

    Raises:
      ArgumentError: The step reads what it computes, to check it.
    """
    layout, options = step._layout, step._options
    if options.checks is not None or step._first_updates is not None:
        raise ArgumentError(
            "`f` must be a step without `checks` and `check_first_updates` on an "
            "island that is a process, got one with them. Leave them out there, or use "
            "`controller.local`."
        )
    k, n = options.accumulate, options.steps_per_call
    axis, depth = batch_axis(k, n), int(n > 1)
    whole = NamedSharding(layout.mesh, PartitionSpec())
    placed = placed_shapes(batch, layout, accumulate=k, steps_per_call=n)
    inputs = [*layout.state_shardings(state)]
    # Microbatches are cut there, of a batch that is whole.
    inputs += [whole if k > 1 else leaf.sharding for leaf in jax.tree.leaves(placed)]
    inputs += [whole] * len(jax.tree.leaves(key))

    def cut(leaf: jax.Array) -> jax.Array:
        rows = leaf.shape[depth] // k
        return leaf.reshape(*leaf.shape[:depth], k, rows, *leaf.shape[depth + 1 :])

    def run(state: PyTree, batch: PyTree, key: Key | None = None) -> Any:
        if k > 1:
            batch = jax.tree.map(cut, batch)
            shardings = layout.batch_shardings(batch, axis=axis)
            batch = jax.lax.with_sharding_constraint(batch, shardings)
        outputs = step._program(FlatTree.of(state), batch, key)
        return outputs.state.tree, joined_metrics(outputs)

    return StepProgram(run=run, inputs=inputs)
