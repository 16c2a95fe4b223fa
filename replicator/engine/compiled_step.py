"""Compile a lifted step for a layout, and call it with bounded run-ahead.

A call takes one global batch and makes one update (or n, with `steps_per_call=n`). A
call with new shapes is traced; `check_step` refuses a wrong step (design law 2) before
XLA sees it, and the executable is kept.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import jax
from jax.extend import core

from replicator.base.flat_tree import FlatTree
from replicator.base.host.clock import Clock
from replicator.base.host.collection_pause import collection_paused
from replicator.base.mesh import put
from replicator.base.out_of_memory import is_out_of_memory
from replicator.base.tracebacks import short_tracebacks
from replicator.base.trees import first_difference
from replicator.base.types import Key, PyTree
from replicator.engine import memory
from replicator.engine.analysis.example_means import is_short
from replicator.engine.analysis.other_meshes import other_meshes_refused
from replicator.engine.analysis.padding import refuse_padding, without_mask
from replicator.engine.analysis.source_lines import user_stacklevel
from replicator.engine.check_step import check_keys, trace_checked
from replicator.engine.first_update.check import CheckedUpdate, FirstUpdates
from replicator.engine.first_update.one_device import UpdateInputs
from replicator.engine.inspection.inspection import Inspection, inspection_of
from replicator.engine.layout import Layout
from replicator.engine.program_cost import Compilation, program_cost
from replicator.engine.program_key import program_key
from replicator.engine.require_eager import in_no_mesh, require_eager, without_mesh
from replicator.engine.run_ahead import RunAhead
from replicator.engine.sharded_step import (
    CompileOptions,
    joined_metrics,
    raise_error,
    shard_step,
)
from replicator.engine.step.donation import Alike, Donation
from replicator.engine.step.microbatch_sums import KeyedStep
from replicator.engine.step.state import as_arrays, check_own_axes, state_shapes
from replicator.errors import ArgumentError, BatchError, DeviceMemoryError
from replicator.inputs.placement import Placed, place, placed_shapes


class RecompilationWarning(UserWarning):
    """A step was compiled again because an argument changed."""


class CompilePhases(Protocol):
    """The note of what a run is doing, and the clock that times it."""

    @property
    def clock(self) -> Clock:
        """Source of the time."""
        ...

    def during(self, phase: Literal["compile"]) -> AbstractContextManager[None]:
        """Note a phase for as long as the context lasts."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _CachedProgram:
    """A compiled program, and facts about it that each call needs.

    Attributes:
      run: The program.
      unmasked: Path of a leaf that follows from the batch without its mask; or None.
      alike: Arguments that could share memory.
      key: Its `program_key`, if its first updates are checked.
      copy_bytes: Size of the copies of its state that saves make; 0 for none.
    """

    run: jax.stages.Compiled
    unmasked: str | None
    alike: Alike
    key: str = ""
    copy_bytes: int = 0


@short_tracebacks
class CompiledStep:
    """A step on all replicas: `state, metrics = step(state, batch[, key])`.

    The state is donated: use the one that is returned. Call it with a global batch
    (leaves [global_batch, ...]) or with what `rep.batches` yields.
    """

    def __init__(
        self,
        update: KeyedStep,
        layout: Layout,
        options: CompileOptions,
        phases: CompilePhases | None = None,
        *,
        first_updates: FirstUpdates | None = None,
        examine: Callable[[PyTree, PyTree], None] | None = None,
    ) -> None:
        self._layout = layout
        self._examine = examine
        self._first_updates = first_updates
        self._options = options
        # Without phases no time is noted, and all times are 0.
        self._during = phases.during if phases else nullcontext
        self._now_s = phases.clock.now_s if phases else float
        self._program = shard_step(update, layout, options)
        self._programs: dict[tuple, _CachedProgram] = {}
        # The last program of such a batch: each call then need not look at the state.
        self._by_batch: dict[tuple, _CachedProgram] = {}
        self._newest: PyTree = None  # shapes of the arguments compiled last
        self._donation = Donation()
        self._run_ahead = RunAhead(options.max_in_flight)
        self._compilations: list[Compilation] = []
        self._uncounted: list[tuple[float, core.ClosedJaxpr, _CachedProgram]] = []

    @property
    def compilations(self) -> Sequence[Compilation]:
        """Compilations so far; their costs are counted when this is read."""
        n = self._options.steps_per_call
        while self._uncounted:
            took_s, jaxpr, program = self._uncounted.pop(0)
            cost = program_cost(jaxpr, program.run, program.copy_bytes)
            self._compilations.append(
                Compilation(seconds=took_s, steps_per_call=n, cost=cost)
            )
        return self._compilations

    @property
    def checked_updates(self) -> Sequence[CheckedUpdate]:
        """Results of the check of the first updates, if that was asked for."""
        return [] if self._first_updates is None else self._first_updates.found

    def __call__(
        self, state: PyTree, batch: PyTree, key: Key | None = None
    ) -> tuple[PyTree, PyTree]:
        """Make one update (or `steps_per_call`) from one global batch.

        Args:
          state: State of `rep.init` or the call before; donated. A loop passes a
            `FlatTree`, and gets one back.
          batch: Leaves [global_batch, ...]; with `steps_per_call=n` [n, global_batch,
            ...]; or a `Placed` batch.
          key: A random key if `step_fn` takes one; n keys with `steps_per_call=n`.

        Returns:
          The new state and the merged metrics, with a leading axis n where
          `steps_per_call=n`. Both are being computed when the call returns.

        Raises:
          BatchError: The batch does not divide, or its leaves do not agree.
          StateError: `step_fn` returned another structure.
          ReplicationError: The returned state may differ between replicas.
          DeviceMemoryError: The step needs more memory than a device has.
          PartitionError: One of the first updates, if these are checked, differs from
            that of one device.
          ArgumentError: The state or the key does not fit, or JAX traces the call.

        Warns:
          SharedBufferWarning: Arrays of the state share memory, and were copied.
        """
        require_eager("step")
        try:
            with without_mesh():
                return self._call(state, batch, key)
        except jax.errors.JaxRuntimeError as failure:
            if not is_out_of_memory(failure):
                raise
            raise self.explained(failure) from failure

    def explained(self, failure: Exception) -> DeviceMemoryError:
        """Return the error to raise for an out-of-memory error of XLA."""
        k, depth = self._options.accumulate, int(self._options.steps_per_call > 1)
        shape = jax.tree.leaves(self._newest["batch"])[0].shape
        examples = math.prod(shape[depth : depth + 1 + int(k > 1)])
        newest = next(reversed(self._by_batch.values()), None)
        return memory.out_of_memory(
            failure,
            need=newest and memory.memory_need(newest.run, newest.copy_bytes),
            limit_bytes=memory.memory_limit_bytes(self._layout.mesh.local_devices),
            accumulate=k,
            replica_batch=examples // len(self._layout.batch_owners),
        )

    def _call(
        self, state: PyTree, batch: PyTree, key: Key | None
    ) -> tuple[PyTree, PyTree]:
        value = self._value(batch)
        flat, donation = FlatTree.of(state), self._donation
        foreign = donation.foreign(flat)
        flat = donation.checked(flat, foreign, value, key)
        program = self._by_batch.get(_signature(value))
        stated = isinstance(batch, Placed) and batch.is_stated
        if program is None:
            program, flat = self._prepare(flat, value, key, stated)
            foreign = range(len(flat.leaves))
        if program.unmasked and isinstance(batch, Placed) and batch.padded:
            refuse_padding(batch, program.unmasked)
        # A batch from `rep.batches`, or of NumPy, was put on the devices just now.
        loose = not isinstance(batch, Placed) and any(
            isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch)
        )

        def run(program: _CachedProgram, flat: FlatTree, foreign: Sequence[int]):
            alike = program.alike
            if foreign or alike.key or (loose and alike.batch):
                flat = donation.apart(
                    flat, foreign, alike, loose=loose, batch=value, key=key
                )
            held = self._held(program, flat, value, key)
            return held, program.run(flat, value, key)

        try:
            held, outputs = run(program, flat, foreign)
        except (TypeError, ValueError):
            # Before anything ran: the program is for another state or key, or for other
            # places of them.
            program, flat = self._prepare(flat, value, key, stated)
            held, outputs = run(program, flat, range(len(flat.leaves)))
        if held is not None:
            assert self._first_updates is not None
            with self._during("compile"):  # as long as that may take
                after, metrics = outputs.state.tree, joined_metrics(outputs)
                self._first_updates.compare(program.key, held, after, metrics)
        donation.returned(outputs.state, as_tree=not isinstance(state, FlatTree))
        self._run_ahead.admit(outputs.token)
        if outputs.error is not None:
            raise_error(outputs.error, self._layout.num_replicas)
        after = outputs.state if isinstance(state, FlatTree) else outputs.state.tree
        return after, joined_metrics(outputs)

    def _held(
        self, program: _CachedProgram, flat: FlatTree, batch: PyTree, key: Key | None
    ) -> UpdateInputs | None:
        """Copy the inputs of an update, if it is to be checked."""
        check = self._first_updates
        if check is None or check.is_done(program.key):
            return None
        if not all(isinstance(leaf, jax.Array) for leaf in flat.leaves):
            raise TypeError  # numbers of the caller, which no program takes
        with self._during("compile"):
            return check.hold(program.key, flat.tree, batch, key)

    @in_no_mesh
    def lower(self, state: PyTree, batch: PyTree, key: Key | None = None):
        """Trace, prove and lower the step; arguments as for `trace`."""
        return _lowered(self.trace(state, batch, key))

    @in_no_mesh
    def trace(self, state: PyTree, batch: PyTree, key: Key | None = None):
        """Trace and prove the step: a `jax.stages.Traced`.

        Args:
          state: Arrays or `jax.ShapeDtypeStruct`s with shardings.
          batch: As in a call, or `jax.ShapeDtypeStruct`s.
          key: As in a call.
        """
        return self._trace(state, self._value(batch, placed_shapes), key)

    @in_no_mesh
    def inspect(
        self,
        state: PyTree = None,
        batch: PyTree = None,
        key: Key | None = None,
        *,
        saves: bool = False,
    ) -> Inspection:
        """Report collectives, memory and arithmetic; see `Replicator.inspect`."""
        if state is not None and batch is None:
            raise ArgumentError(
                "`batch` must be given to inspect a step with a state, got None. Pass "
                "a global batch, or `jax.ShapeDtypeStruct`s."
            )
        if state is not None or batch is not None:
            check_keys(key, self._options.steps_per_call)
            shapes = state_shapes(state, self._layout, name="state")
            traced = self._trace(shapes, self._value(batch, placed_shapes), key)
            compiled = _lowered(traced).compile()
            cost = program_cost(traced.jaxpr, compiled)
        elif self._programs:
            compiled = next(reversed(self._programs.values())).run
            cost = self.compilations[-1].cost
            shapes = state_shapes(self._newest["state"], self._layout, name="state")
        else:
            raise ArgumentError(
                "`step` must have been called, or come with `state` and `batch`, got "
                "one that is not compiled. Pass `init_fn` and a global batch."
            )
        return inspection_of(
            compiled,
            cost=cost,
            layout=self._layout,
            state=shapes,
            copies=max(saves, self._options.state_copies),
            steps_per_call=self._options.steps_per_call,
        )

    def _value(self, batch: PyTree, placing: Callable[..., PyTree] = place) -> PyTree:
        """Return the arrays of a batch in the layout that the program takes."""
        n, k = self._options.steps_per_call, self._options.accumulate
        if not isinstance(batch, Placed):
            return placing(batch, self._layout, accumulate=k, steps_per_call=n)
        if (batch.accumulate, batch.steps_per_call) != (k, n):
            raise BatchError(
                f"`batch` must be placed for accumulate={k} and steps_per_call={n}, "
                f"got {batch.accumulate} and {batch.steps_per_call}. Set both in "
                "`rep.batches(dataset, InputOptions(...))`."
            )
        return batch.value

    def _prepare(
        self, flat: FlatTree, batch: PyTree, key: Key | None, stated: bool
    ) -> tuple[_CachedProgram, FlatTree]:
        """Find or compile the program for these; put the state in its place."""
        state = self._layout.pad_state(as_arrays(flat.tree))
        shardings = self._layout.state_shardings(state)
        check_own_axes("state", state, self._layout)
        check_keys(key, self._options.steps_per_call)
        state = put(state, shardings)
        signature = _signature((state, batch, key))
        program = self._programs.get(signature)
        if program is None:
            with self._during("compile"):
                program = self._compile(state, batch, key, stated)
            self._programs[signature] = program
        self._by_batch[_signature(batch)] = program
        return program, FlatTree.of(state)

    def _compile(
        self, state: PyTree, batch: PyTree, key: Key | None, stated: bool
    ) -> _CachedProgram:
        started_s = self._now_s()
        given = jax.tree.map(_shape, {"state": state, "batch": batch, "key": key})
        if self._newest is not None and not stated:
            _warn_of_change(self._newest, given)
        with collection_paused():
            traced = self._trace(state, batch, key)
            if self._examine is not None and is_short(traced.jaxpr.jaxpr):
                self._examine(given["state"], given["batch"])
            self._newest = given
            lowered = _lowered(traced)
        self._layout.processes.require_same_program(
            self._layout.mesh, lambda: program_key(lowered)
        )
        compiled = lowered.compile()
        took_s = self._now_s() - started_s
        program = _CachedProgram(
            run=compiled,
            unmasked=without_mask(traced.jaxpr.jaxpr, state, batch),
            alike=Alike.of(state, batch, key),
            key=program_key(lowered) if self._first_updates is not None else "",
            copy_bytes=self._options.state_copies * memory.state_bytes(state),
        )
        self._uncounted.append((took_s, traced.jaxpr, program))
        return program

    def _trace(self, state: PyTree, batch: PyTree, key: Key | None):
        return trace_checked(
            self._program,
            self._layout,
            self._options,
            state=state,
            batch=batch,
            key=key,
        )


def _warn_of_change(before: PyTree, now: PyTree) -> None:
    change = first_difference(before, now)
    if change is not None:
        warnings.warn(
            f"the step is compiled again: {change}. Keep shapes and dtypes of state "
            "and batch the same; pad uneven ones.",
            RecompilationWarning,
            stacklevel=user_stacklevel(),
        )


def _lowered(traced: jax.stages.Traced) -> jax.stages.Lowered:
    with other_meshes_refused("step_fn"):
        return traced.lower()


def _signature(tree: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
