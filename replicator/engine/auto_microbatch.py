"""Find the smallest number of microbatches that fits into memory.

Divisors are tried from 1 on: most often that fits. A program is compiled, which shows
how much memory it needs, and run only if it seems to fit; if it does not after all
(fragmentation, other programs), the next one is tried.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from replicator.base.mesh import spans_processes
from replicator.base.out_of_memory import is_out_of_memory, readable
from replicator.base.types import Dataset, PyTree, StepFn
from replicator.engine import memory
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.layout import Layout
from replicator.engine.make_step import compiled_step
from replicator.engine.sharded_step import CompileOptions
from replicator.errors import ArgumentError, DeviceMemoryError, check_count, check_whole
from replicator.inputs.adapters import check_read_anew
from replicator.inputs.checks import check_divides
from replicator.inputs.context import name_of_parts
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions, refuse_shapes


def find_accumulate(
    compile_need: Callable[[int], memory.MemoryNeed | None],
    run_once: Callable[[int], object],
    *,
    replica_batch: int,
    limit_bytes: int | None,
) -> int:
    """Return the smallest number of microbatches with which a step fits.

    Args:
      compile_need: Compiles the step for a number of microbatches and returns the
        memory that it needs; None if the backend does not report it.
      run_once: Runs the step once for a number of microbatches; raises if it does not
        fit.
      replica_batch: Number of examples of one replica in a global batch.
      limit_bytes: Memory of a device; None if it is not known.

    Returns:
      A divisor of `replica_batch`.

    Raises:
      DeviceMemoryError: Not even one example at a time fits.

    >>> find_accumulate(
    ...     lambda k: memory.MemoryNeed(
    ...         arguments_bytes=0, outputs_bytes=0, aliased_bytes=0,
    ...         program_bytes=0, temporaries_bytes=600 // k),
    ...     lambda k: None, replica_batch=8, limit_bytes=200
    ... )
    4
    """
    need: memory.MemoryNeed | None = None
    for accumulate in (1, *memory.larger_divisors(replica_batch, 1)):
        try:
            need = compile_need(accumulate)
            if need is None or limit_bytes is None or need.total_bytes <= limit_bytes:
                run_once(accumulate)
                return accumulate
        except Exception as failure:
            if not is_out_of_memory(failure) and not isinstance(
                failure, DeviceMemoryError
            ):
                raise
    raise _nothing_fits(need, limit_bytes, replica_batch)


def check_memory_limit(limit_bytes: int | None, *, auto_microbatch: bool) -> None:
    """Refuse a limit that is not a number of bytes, or that would have no effect.

    Raises:
      ArgumentError: It is.

    >>> check_memory_limit(8 << 30, auto_microbatch=True)
    """
    if limit_bytes is None:
        return
    check_whole("memory_limit_bytes", limit_bytes)
    check_count("memory_limit_bytes", int(limit_bytes))
    if not auto_microbatch:
        raise ArgumentError(
            "`memory_limit_bytes` must come with `auto_microbatch`, got "
            f"{limit_bytes} without. Pass `auto_microbatch=True`, or leave it out."
        )


def fit_accumulate(
    step_fn: StepFn,
    layout: Layout,
    options: CompileOptions,
    *,
    make_state: Callable[[], PyTree],
    batch: PyTree,
    limit_bytes: int | None = None,
) -> int:
    """Return the smallest `accumulate` with which a run's step fits.

    Args:
      step_fn: Step of one replica.
      layout: Layout of the replicas on devices.
      options: Options of the compiled step, without `accumulate`.
      make_state: Makes the run's first state, anew for each try.
      batch: One global batch, as the step gets it, mask included.
      limit_bytes: Memory of a device; as the devices report it by default.

    Raises:
      DeviceMemoryError: Not even one example at a time fits.
      BatchError: The batch does not divide over the replicas.
    """
    examples = len(jax.tree.leaves(batch)[0])
    parts = len(layout.batch_owners)
    check_divides(examples, parts=parts, kind=name_of_parts(layout), accumulate=1)
    if options.steps_per_call > 1:
        batch = jax.tree.map(lambda x: np.stack([x] * options.steps_per_call), batch)

    shapes = jax.tree.map(_shape, make_state())

    def lifted(accumulate: int) -> CompiledStep:
        chosen = dataclasses.replace(options, accumulate=accumulate)
        return compiled_step(step_fn, layout, chosen, counted=True)

    copied = options.state_copies * memory.state_bytes(shapes)

    def compile_need(accumulate: int) -> memory.MemoryNeed | None:
        lowered = lifted(accumulate).lower(shapes, batch)
        return memory.memory_need(lowered.compile(), copied)

    def run_once(accumulate: int) -> None:
        # A second state lies where a save's copy will.
        copy = jax.block_until_ready(make_state()) if copied else None
        jax.block_until_ready(lifted(accumulate)(make_state(), batch))
        del copy

    return find_accumulate(
        compile_need,
        run_once,
        replica_batch=examples // parts,
        limit_bytes=limit_bytes or memory.memory_limit_bytes(layout.mesh.local_devices),
    )


def first_batch(
    dataset: Dataset,
    layout: Layout,
    options: InputOptions,
    *,
    why: str = "auto_microbatch=True",
) -> PyTree:
    """Read the first global batch of a dataset, as a step gets it, and no more.

    Args:
      dataset: It is read again afterwards.
      layout: Layout of the replicas on devices.
      options: Options of the input.
      why: Argument that needs it, for errors.

    Raises:
      ArgumentError: The dataset can be read only once, or its shapes change.
      BatchError: It is empty, or does not divide over the replicas.
    """
    refuse_shapes(options, f"with `{why}`, which takes the first batch")
    check_read_anew("dataset", dataset, why=why, adapters=options.adapters)
    alone = dataclasses.replace(options, accumulate=1, steps_per_call=1, steps=1)
    with open_input(dataset, layout, options=alone) as batches:
        batch = next(batches).value
        if spans_processes(layout.mesh):
            return multihost_utils.process_allgather(batch, tiled=True)
        return jax.tree.map(np.asarray, batch)


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _nothing_fits(
    need: memory.MemoryNeed | None, limit_bytes: int | None, replica_batch: int
) -> DeviceMemoryError:
    needed = "more than there is" if need is None else need.describe()
    there = f" and there are {readable(limit_bytes)}" if limit_bytes is not None else ""
    return DeviceMemoryError(
        "`auto_microbatch` must find microbatches that fit into each device's memory, "
        f"got none: with {replica_batch} of them the step needs {needed}{there}. "
        "Use a smaller model, or a smaller global batch on more replicas."
    )
