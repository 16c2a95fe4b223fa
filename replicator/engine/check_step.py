"""Refuse a step that cannot be right: when it is traced, before XLA sees it."""

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.flat_tree import FlatTree
from replicator.base.trees import describe
from replicator.base.types import Key, PyTree
from replicator.collectives.context.keys import check_key
from replicator.engine.analysis.ordered_bits import refuse_other_collectives
from replicator.engine.analysis.other_meshes import other_meshes_refused
from replicator.engine.layout import Layout
from replicator.engine.sharded_step import CompileOptions
from replicator.engine.step.optimizer_state import optimizer_states
from replicator.errors import ArgumentError, StateError
from replicator.inputs.placement import batch_axis


def trace_checked(
    program: jax.stages.Wrapped,
    layout: Layout,
    options: CompileOptions,
    *,
    state: PyTree,
    batch: PyTree,
    key: Key | None,
) -> jax.stages.Traced:
    """Trace a step's program, and refuse it where it is wrong.

    Args:
      program: From `shard_step`, with the same layout and options.
      layout: Layout of the replicas on devices.
      options: Options of the compiled step.
      state: State of the program: arrays, or shapes with shardings.
      batch: Likewise, as placed.
      key: Likewise.

    Raises:
      ArgumentError: Optimizers of the state do not fit each other or the replicator, or
        the step has collectives of its own where the order of sums is fixed.
      StateError: The step uses a value of another trace.
      ReplicatorError: The layout's engine would run the step wrongly.
    """
    _check_optimizers(state, options)
    with other_meshes_refused("step_fn"):
        traced = program.trace(FlatTree.of(state), batch, key)
    jaxpr = traced.jaxpr.jaxpr
    if len(jaxpr.invars) > len(jax.tree.leaves((state, batch, key))):
        raise StateError(
            "`step_fn` must compute with its arguments alone, got a value that another "
            "trace of a step left outside: in a list, an object or a global name. "
            "Return it among the state or the metrics."
        )
    if options.reduction == "ordered":
        refuse_other_collectives(jaxpr)
    axis = batch_axis(options.accumulate, options.steps_per_call)
    layout.check(jaxpr, state, batch, batch_axis=axis)
    return traced


def _check_optimizers(state: PyTree, options: CompileOptions) -> None:
    optimizers = optimizer_states(state)
    names = [each.name for each in optimizers]
    if len(set(names)) < len(names):
        raise ArgumentError(
            "`name` must differ between the optimizers of one state, got "
            f"{', '.join(map(repr, names))}. Pass `rep.wrap_optimizer(tx, name=...)`."
        )
    for each in optimizers:
        if each.reduction != options.reduction:
            raise ArgumentError(
                f"`reduction` must be the same for optimizer and replicator, got "
                f"{each.reduction!r} for `{each.name}` and {options.reduction!r}. Wrap "
                "it with `rep.wrap_optimizer`."
            )


def check_keys(key: Key | None, steps_per_call: int) -> None:
    """Refuse a value that is not one random key, or not one for each step of a call.

    Raises:
      ArgumentError: It is not.

    >>> check_keys(jax.random.split(jax.random.key(0), 4), steps_per_call=4)
    """
    check_key(key)
    if key is None:
        return
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and (key.dtype != np.uint32 or key.ndim == 0):
        raise ArgumentError(
            f"`key` must be a random key, got {describe(key)}. Pass "
            "`jax.random.key(0)`."
        )
    # A key of the old kind is an array of numbers: its last axis does not count keys.
    shape = key.shape if typed else key.shape[:-1]
    if steps_per_call > 1 and shape != (steps_per_call,):
        raise ArgumentError(
            f"`key` must hold {steps_per_call} keys with "
            f"`steps_per_call={steps_per_call}`, got {describe(key)}. Pass "
            f"`jax.random.split(key, {steps_per_call})`."
        )
    if steps_per_call == 1 and shape:
        raise ArgumentError(
            f"`key` must be one key, got {describe(key)}. Pass one of them, and draw "
            "more in the step with `jax.random.split`."
        )
