"""Find the smallest number of microbatches that fits into memory.

A pure search: more microbatches need less, so what does not fit rules out all smaller
numbers, and what fits makes larger ones pointless. Programs are compiled, which tells
what they need, and only the one that seems to fit is run; if it does not after all
(fragmentation, other programs), the search goes on above it.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from replicator.base.types import Dataset, PyTree, StepFn
from replicator.engine.compiled_step import CompiledStep
from replicator.engine.make_step import compiled_step
from replicator.engine.memory_errors import (
    MemoryNeed,
    is_out_of_memory,
    larger_divisors,
    memory_limit_bytes,
    memory_need,
    readable,
)
from replicator.engine.sharded_step import CompileOptions
from replicator.errors import ArgumentError, DeviceMemoryError, check_count, check_whole
from replicator.inputs.checks import check_divides
from replicator.inputs.feed import open_input
from replicator.inputs.options import InputOptions
from replicator.inputs.skipped_batches import require_rereadable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is known of the candidates so far.

    Attributes:
      candidates: Numbers of microbatches, ascending.
      too_big: So many of the first ones do not fit.
      fits: The place of the first one that is known to fit; None if none is.
    """

    candidates: tuple[int, ...]
    too_big: int = 0
    fits: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fits:
    """A program with so many microbatches fits."""

    accumulate: int


@dataclasses.dataclass(frozen=True, slots=True)
class TooBig:
    """A program with so many microbatches does not fit."""

    accumulate: int


@dataclasses.dataclass(frozen=True, slots=True)
class Compile:
    """Find out whether so many fit."""

    accumulate: int


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """So many fit, and no smaller number does."""

    accumulate: int


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """Nothing fits."""


Action: TypeAlias = Compile | Use | GiveUp


def decide(search: Search, event: Fits | TooBig | None) -> tuple[Search, Action]:
    """Say what to try next.

    Args:
      search: What is known.
      event: What was found out; None at the beginning.

    Returns:
      What is known now, and what to do.
    """
    if event is not None:
        place = search.candidates.index(event.accumulate)
        if isinstance(event, Fits):
            search = dataclasses.replace(search, fits=place)
        else:
            above = search.fits is not None and search.fits > place
            search = dataclasses.replace(
                search, too_big=place + 1, fits=search.fits if above else None
            )
    low, high = search.too_big, search.fits
    if low >= len(search.candidates):
        return search, GiveUp()
    if high is not None and high <= low:
        return search, Use(search.candidates[high])
    # The first alone is tried by itself: most often it fits.
    top = len(search.candidates) - 1 if high is None else high - 1
    place = 0 if low == 0 else (low + top) // 2
    return search, Compile(search.candidates[place])


def find_accumulate(
    compile_need: Callable[[int], MemoryNeed | None],
    *,
    replica_batch: int,
    limit_bytes: int | None,
    run_once: Callable[[int], object] | None = None,
) -> int:
    """Return the smallest number of microbatches with which a step fits.

    Args:
      compile_need: Compiles the step for a number of microbatches and says what it
        needs; None where the backend does not tell.
      replica_batch: Examples of one replica in a global batch.
      limit_bytes: The memory of a device; None where it is not known.
      run_once: Runs the step once, for what only a run can tell.

    Returns:
      A divisor of `replica_batch`.

    Raises:
      DeviceMemoryError: Not even one example at a time fits.
      ArgumentError: There is neither a limit nor a way to run.
    """
    if limit_bytes is None and run_once is None:
        raise ArgumentError(
            "`auto_microbatch` must know a device's memory, got a backend that does "
            "not tell. Pass `memory_limit_bytes`, or choose `accumulate` yourself."
        )
    search = Search(candidates=(1, *larger_divisors(replica_batch, 1)))
    newest: MemoryNeed | None = None
    search, action = decide(search, None)
    while True:
        match action:
            case Compile(k):
                newest, fits = _compiled(compile_need, k, limit_bytes, newest)
                search, action = decide(search, Fits(k) if fits else TooBig(k))
            case Use(k):
                if run_once is None or _runs(run_once, k):
                    return k
                search, action = decide(search, TooBig(k))
            case GiveUp():
                raise _nothing_fits(newest, limit_bytes, replica_batch)


def check_memory_limit(limit_bytes: int | None, *, auto_microbatch: bool) -> None:
    """Refuse a limit that is no number of bytes, or that nothing would obey.

    Raises:
      ArgumentError: It is.
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
    mesh: Mesh,
    options: CompileOptions,
    *,
    make_state: Callable[[], PyTree],
    batch: PyTree,
    limit_bytes: int | None = None,
) -> int:
    """Return the smallest `accumulate` with which a run's step fits on a mesh.

    Args:
      step_fn: What one replica does.
      mesh: The replicas.
      options: How it is to be lifted, but for `accumulate`.
      make_state: Makes the run's first state, anew for each try.
      batch: One global batch, as the step gets it, mask included.
      limit_bytes: The memory of a device; the devices' own word by default.

    Raises:
      DeviceMemoryError: Not even one example at a time fits.
      BatchError: The batch does not divide over the replicas.
    """
    examples = len(jax.tree.leaves(batch)[0])
    check_divides(examples, replicas=mesh.size, accumulate=1)
    if options.steps_per_call > 1:
        batch = jax.tree.map(lambda x: np.stack([x] * options.steps_per_call), batch)

    shapes = jax.tree.map(_shape, make_state())

    def lifted(accumulate: int) -> CompiledStep:
        chosen = dataclasses.replace(options, accumulate=accumulate)
        return compiled_step(step_fn, mesh, chosen, counted=True)

    def compile_need(accumulate: int) -> MemoryNeed | None:
        lowered = lifted(accumulate).lower(shapes, batch)
        return memory_need(lowered.compile())

    def run_once(accumulate: int) -> None:
        jax.block_until_ready(lifted(accumulate)(make_state(), batch))

    return find_accumulate(
        compile_need,
        replica_batch=examples // mesh.size,
        limit_bytes=limit_bytes or memory_limit_bytes(mesh.local_devices),
        run_once=run_once,
    )


def first_batch(dataset: Dataset, mesh: Mesh, options: InputOptions) -> PyTree:
    """Read the first global batch of a dataset, as a step gets it, and no more.

    Args:
      dataset: It is read again afterwards.
      mesh: The replicas.
      options: How it is read.

    Raises:
      ArgumentError: The dataset can be read only once.
      BatchError: It is empty, or does not divide over the replicas.
    """
    require_rereadable(dataset, why="auto_microbatch=True")
    alone = dataclasses.replace(options, accumulate=1, steps_per_call=1, steps=1)
    with open_input(dataset, mesh, options=alone) as batches:
        return jax.tree.map(np.asarray, next(batches).value)


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _compiled(
    compile_need: Callable[[int], MemoryNeed | None],
    accumulate: int,
    limit_bytes: int | None,
    newest: MemoryNeed | None,
) -> tuple[MemoryNeed | None, bool]:
    try:
        need = compile_need(accumulate)
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        return newest, False
    if need is None or limit_bytes is None:
        return need, True
    return need, need.total_bytes <= limit_bytes


def _runs(run_once: Callable[[int], object], accumulate: int) -> bool:
    try:
        run_once(accumulate)
    except Exception as failure:
        if not is_out_of_memory(failure) and not isinstance(failure, DeviceMemoryError):
            raise
        return False
    return True


def _nothing_fits(
    need: MemoryNeed | None, limit_bytes: int | None, replica_batch: int
) -> DeviceMemoryError:
    needed = "more than there is" if need is None else need.describe()
    there = f" and there are {readable(limit_bytes)}" if limit_bytes is not None else ""
    return DeviceMemoryError(
        "`auto_microbatch` must find microbatches that fit into each device's memory, "
        f"got none: with {replica_batch} of them the step needs {needed}{there}. "
        "Use a smaller model, or a smaller global batch on more replicas."
    )
