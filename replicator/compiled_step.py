"""Compile a lifted step for a mesh, prove it, and call it with bounded run-ahead.

A call takes one global batch and makes one update (or n, with `steps_per_call=n`). Each
new signature of a batch is traced once; the jaxpr is proved (design law 2) before XLA
sees it, and the executable is kept.
"""

import dataclasses
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

from replicator import dataflow, proof
from replicator.accumulate import KeyedStep
from replicator.errors import ArgumentError, BatchError
from replicator.inputs.placement import Placed, place
from replicator.inputs.remainder import MASK
from replicator.ordered_bits import refuse_other_collectives
from replicator.per_replica import PerReplica, is_per_replica
from replicator.program import (
    CompileOptions,
    joined_metrics,
    make_program,
    raise_error,
)
from replicator.protocols import Key, PyTree
from replicator.run_ahead import RunAhead
from replicator.state import state_shardings
from replicator.trees import describe, first_difference, leaf_path, named_leaves


class RecompilationWarning(UserWarning):
    """A step was compiled again because an argument changed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Executable:
    """A compiled program, and whether anything in it follows from the batch's mask."""

    run: Callable
    reads_mask: bool


class CompiledStep:
    """A step on all replicas of a mesh: `state, metrics = step(state, batch[, key])`.

    The state is donated: use the one that is returned. Call it with a global batch
    (leaves [global_batch, ...]) or with what `rep.batches` yields.
    """

    def __init__(self, update: KeyedStep, mesh: Mesh, options: CompileOptions) -> None:
        self._mesh = mesh
        self._options = options
        self._program = make_program(update, mesh, options)
        self._executables: dict[tuple, _Executable] = {}
        self._signatures: list[PyTree] = []
        self._run_ahead = RunAhead(options.max_in_flight)

    def __call__(
        self, state: PyTree, batch: PyTree, key: Key | None = None
    ) -> tuple[PyTree, PyTree]:
        """Make one update (or `steps_per_call`) from one global batch.

        Args:
          state: From `rep.init` or the call before; donated.
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
        """
        value = batch.value if isinstance(batch, Placed) else self._place(batch)
        signature = _signature(value)
        program = self._executables.get(signature)
        if program is None:
            program, state = self._compile(signature, state, value, key)
        if isinstance(batch, Placed) and batch.padded and not program.reads_mask:
            _refuse_padding(batch)
        try:
            outputs = program.run(state, value, key)
        except (TypeError, ValueError):
            # Before anything ran: the state or the key is not what was compiled for.
            program, state = self._compile(signature, state, value, key)
            outputs = program.run(state, value, key)
        self._run_ahead.admit(outputs.shared, otherwise=outputs.state)
        if outputs.error is not None:
            raise_error(outputs.error, self._mesh.size)
        return outputs.state, joined_metrics(outputs)

    def lower(self, state: PyTree, batch: PyTree, key: Key | None = None):
        """Trace, prove and lower the step, and compile nothing.

        Args:
          state: Arrays or `jax.ShapeDtypeStruct`s with shardings.
          batch: As in a call.
          key: As in a call.

        Returns:
          A `jax.stages.Lowered`.
        """
        value = batch.value if isinstance(batch, Placed) else self._place(batch)
        return self._prove(state, value, key).lower()

    def _place(self, batch: PyTree) -> PyTree:
        return place(
            batch,
            self._mesh,
            accumulate=self._options.accumulate,
            steps_per_call=self._options.steps_per_call,
        )

    def _compile(
        self, signature: tuple, state: PyTree, batch: PyTree, key: Key | None
    ) -> tuple["_Executable", PyTree]:
        """Compile for this signature; return that and the state on the mesh."""
        state = jax.tree.map(jnp.asarray, state)
        given = jax.tree.map(_shape, {"state": state, "batch": batch, "key": key})
        if self._signatures:
            _warn_of_change(self._signatures[-1], given)
        traced = self._prove(state, batch, key)
        executable = _Executable(
            run=traced.lower().compile(),
            reads_mask=_reads_mask(traced.jaxpr.jaxpr, state, batch),
        )
        self._executables[signature] = executable
        self._signatures.append(given)
        return executable, jax.device_put(state, state_shardings(state, self._mesh))

    def _prove(self, state: PyTree, batch: PyTree, key: Key | None):
        _check_declared(state, self._mesh.size)
        traced = self._program.trace(state, batch, key)
        inside = _shard_map_body(traced.jaxpr.jaxpr)
        if self._options.ordered:
            refuse_other_collectives(inside)
        inputs = [
            *_state_marks(state),
            *[proof.BATCH] * len(jax.tree.leaves(batch)),
            *[proof.CLEAN] * len(jax.tree.leaves(key)),
        ]
        # Arrays that the step closes over come first; they are the same everywhere.
        constants = len(inside.invars) - len(inputs)
        paths = _must_agree(state)
        paths += [None] * (len(inside.outvars) - len(paths))
        proof.prove_replicated(inside, [proof.CLEAN] * constants + inputs, paths)
        return traced


def _warn_of_change(before: PyTree, now: PyTree) -> None:
    change = first_difference(before, now)
    if change is not None:
        warnings.warn(
            f"the step is compiled again: {change}. Keep shapes and dtypes of state "
            "and batch the same; pad what is uneven.",
            RecompilationWarning,
            stacklevel=4,
        )


def _refuse_padding(batch: Placed) -> None:
    raise BatchError(
        f'`step_fn` must read `batch["{MASK}"]` where a batch is padded, got '
        f"{batch.examples} examples at batch {batch.index} and no use of it. Weight "
        "the loss by it, or drop what is left over: `InputOptions(remainder='drop')`."
    )


def _reads_mask(jaxpr: core.Jaxpr, state: PyTree, batch: PyTree) -> bool:
    """Tell whether any output of the program depends on the batch's mask."""
    marks = [frozenset()] * len(jaxpr.invars)
    before = len(jax.tree.leaves(state))
    for position, (path, _) in enumerate(named_leaves(batch)):
        if path == MASK:
            marks[before + position] = frozenset({0})
    return any(dataflow.flow(jaxpr, marks, dataflow.DependsOn()))


def _signature(batch: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shard_map_body(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Return what one replica computes."""
    [eqn] = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    [body] = dataflow.sub_jaxprs(eqn)
    return body


def _state_marks(state: PyTree) -> list[proof.Mark]:
    return [
        proof.DECLARED if declared else proof.CLEAN
        for _, declared in _state_leaves(state)
    ]


def _must_agree(state: PyTree) -> list[str | None]:
    """Per leaf of the state: its path if it must be equal on all replicas."""
    return [None if declared else path for path, declared in _state_leaves(state)]


def _state_leaves(state: PyTree) -> list[tuple[str, bool]]:
    """List (path, whether declared per replica) of the leaves of `state`."""
    leaves = []
    for path, node in jax.tree_util.tree_flatten_with_path(
        state, is_leaf=is_per_replica
    )[0]:
        declared = is_per_replica(node)
        leaves += [(leaf_path(path), declared)] * len(jax.tree.leaves(node))
    return leaves


def _check_declared(state: PyTree, num_replicas: int) -> None:
    for path, node in named_leaves(state, is_leaf=is_per_replica):
        for leaf in jax.tree.leaves(node) if isinstance(node, PerReplica) else ():
            if leaf.shape[:1] != (num_replicas,):
                raise ArgumentError(
                    f"`state` must hold a leading axis of {num_replicas} replicas at "
                    f"`{path}`, a `PerReplica` leaf, got {describe(leaf)}. Make the "
                    "state with `rep.init(init_fn)`."
                )
