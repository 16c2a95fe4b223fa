"""Evaluate a state on every example of a dataset, once, with the same bits on any mesh.

The stream of examples is cut into blocks of a fixed size. Every block passes the same
`lax.scan` body, always as one of `BLOCKS_PER_CALL`, so its numbers depend neither on
how many replicas there are nor on how the dataset is batched; the host adds them up in
example order, in float64. What fills up the last blocks weighs nothing.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import Mesh

from replicator import dataflow
from replicator.collectives.keys import refuse_keys
from replicator.eager_calls import require_eager
from replicator.errors import ArgumentError, check_function, check_whole
from replicator.exact_metrics import (
    DATA_MARK,
    MASK_MARK,
    check_exact,
    refuse_collectives,
)
from replicator.inputs.one_pass import BATCH, open_one_pass
from replicator.inputs.options import InputOptions
from replicator.inputs.remainder import MASK
from replicator.lookup_notes import names_noted
from replicator.mesh import put, readable, replica_spec
from replicator.metric_totals import BlockRows, MetricTotals
from replicator.per_replica import is_per_replica, per_replica_specs, take_own
from replicator.protocols import Dataset, PyTree
from replicator.run_ahead import DEFAULT_RUN_AHEAD, RunAhead
from replicator.state import state_shardings
from replicator.trees import describe, named_leaves

EvalFn = Callable[[PyTree, PyTree], dict[str, PyTree]]
"""`eval_fn(state, batch) -> metrics`: what one replica does with one block."""

EXAMPLES = "examples"
DEFAULT_BLOCK = 64
# Fixed, because a loop of another length may be compiled otherwise; even, because the
# door looks at the same rows in blocks of double size.
BLOCKS_PER_CALL = 4


class Evaluation:
    """An evaluation on all replicas of a mesh: `metrics = evaluation(state, dataset)`.

    Make it once and call it often: what was compiled is kept.

    Args:
      eval_fn: `eval_fn(state, batch)` gets a block of examples, and returns a dict of
        metrics. A plain array has one row per example, and is averaged. Anything else
        is declared: `Mean(value, weight)`, `Sum`, `Max`, `PerReplica`, and weighted by
        `batch["mask"]`, 0 for rows that only fill up, which is there where batches are
        dicts. A mask of the dataset's own is multiplied by it; if that has one number
        per example, rows of plain arrays count so much.
      mesh: The replicas.
      block: Examples that `eval_fn` gets at a time. Bits depend on it.
      max_in_flight: Calls dispatched and not yet finished, at most.

    Raises:
      ArgumentError: `eval_fn` is no function of a state and a batch, or `block` is
        below 1.
    """

    def __init__(
        self,
        eval_fn: EvalFn,
        mesh: Mesh,
        *,
        block: int = DEFAULT_BLOCK,
        max_in_flight: int = DEFAULT_RUN_AHEAD,
    ) -> None:
        check_function("eval_fn", eval_fn, "state, batch")
        check_whole("block", block)
        if block < 1:
            raise ArgumentError(f"`block` must be at least 1, got {block}. Use 1.")
        self._mesh = mesh
        self._block = block
        self._max_in_flight = max_in_flight
        self._program = _make_program(eval_fn, mesh, block)
        self._doubled = _make_program(eval_fn, mesh, 2 * block)
        self._checked: set[tuple] = set()

    def __call__(
        self, state: PyTree, dataset: Dataset, *, inputs: InputOptions | None = None
    ) -> dict[str, PyTree]:
        """Evaluate `state` on every example of `dataset`; wait for the result.

        Args:
          state: From `rep.init`, a compiled step or `result.state`; it is not changed,
            and not donated.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          inputs: How it is read; its `steps` count batches of the dataset, and its
            `accumulate`, `steps_per_call`, `epochs` and `remainder` mean nothing here.

        Returns:
          The metrics over all examples: Python numbers, and NumPy arrays where a metric
          is no scalar. `examples` says how many there were.

        Raises:
          ArgumentError: `eval_fn` returns what could not be counted exactly, or JAX
            traces the call.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        require_eager("evaluate")
        state = self._place(state)
        totals = MetricTotals(num_replicas=self._mesh.size)
        ahead = RunAhead(self._max_in_flight)
        waiting: deque[_Blocks] = deque()
        rows = BLOCKS_PER_CALL * self._block
        with open_one_pass(
            dataset, self._mesh, replica_batch=rows, options=inputs
        ) as batches:
            for batch in batches:
                self._check(state, batch)
                waiting.append(self._program(state, batch))
                ahead.admit(waiting[-1])
                while len(waiting) > ahead.in_flight:
                    _count(totals, waiting.popleft())
        for blocks in waiting:
            _count(totals, blocks)
        return {**totals.merged(), EXAMPLES: totals.examples}

    def _place(self, state: PyTree) -> PyTree:
        state = jax.tree.map(jnp.asarray, state)
        for path, node in named_leaves(state, is_leaf=is_per_replica):
            for leaf in jax.tree.leaves(node) if is_per_replica(node) else ():
                if leaf.shape[:1] != (self._mesh.size,):
                    raise ArgumentError(
                        "`state` must hold a row for each of "
                        f"{self._mesh.size} replicas at `{path}`, a `PerReplica` leaf, "
                        f"got {describe(leaf)}. Evaluate on the replicas it is from."
                    )
        return put(state, state_shardings(state, self._mesh))

    def _check(self, state: PyTree, batch: PyTree) -> None:
        """Refuse metrics that could not be exact, once for each signature."""
        leaves, treedef = jax.tree.flatten((state, batch))
        signature = (treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
        if signature in self._checked:
            return
        traced = self._program.trace(state, batch)
        refuse_collectives(traced.jaxpr.jaxpr)
        check_exact(
            traced.out_info.metrics,
            doubled=self._double(state, batch),
            block=self._block,
            marks=_follow(traced.jaxpr.jaxpr, state, batch),
        )
        self._checked.add(signature)

    def _double(self, state: PyTree, batch: PyTree) -> PyTree:
        try:
            return jax.eval_shape(self._doubled, state, batch).metrics
        except Exception as failure:
            failure.add_note(
                f"`eval_fn` was traced with {2 * self._block} examples, after "
                f"{self._block}, to see which metrics have one row per example."
            )
            raise


class _Blocks(NamedTuple):
    """What one call hands back; leaves have a leading axis of blocks."""

    metrics: dict[str, PyTree]
    real: jax.Array  # how many rows of each block are examples
    weights: jax.Array  # what each row of each block counts


def _make_program(eval_fn: EvalFn, mesh: Mesh, block: int) -> Any:
    """Return the jitted `program(state, {"batch", "mask"}) -> _Blocks`."""

    def replica(state: PyTree, rows: PyTree) -> _Blocks:
        leaves, treedef = jax.tree.flatten(take_own(state))

        def run(carry: None, each: PyTree) -> tuple[None, _Blocks]:
            # Built anew for each block: a module that counts or keeps statistics
            # changes a copy of its own, and the next block meets it as it was.
            own = treedef.unflatten(leaves)
            real = each[MASK]
            batch, weights = _with_mask(each[BATCH], real)
            with names_noted(own, batch):
                metrics = _checked_dict(eval_fn(own, batch))
            return carry, _Blocks(metrics, real.sum(), weights)

        blocks = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), rows)
        return lax.scan(run, None, blocks)[1]

    def program(state: PyTree, rows: PyTree) -> _Blocks:
        cut = replica_spec()
        blocks = jax.shard_map(
            replica,
            mesh=mesh,
            in_specs=(per_replica_specs(state), cut),
            out_specs=cut,
            check_vma=False,
        )(state, rows)
        return readable(blocks, mesh)

    return jax.jit(program)


def _with_mask(batch: PyTree, real: jax.Array) -> tuple[PyTree, jax.Array]:
    """Put the mask into a dict, times its own; return also what each row counts."""
    if not isinstance(batch, dict):
        return batch, real
    if MASK not in batch:
        return {**batch, MASK: real}, real

    def times_real(leaf: jax.Array) -> jax.Array:
        column = real.reshape(-1, *[1] * (leaf.ndim - 1))
        return leaf * column.astype(leaf.dtype)

    own = jax.tree.map(times_real, batch[MASK])
    by_row = isinstance(own, jax.Array) and own.ndim == 1
    return {**batch, MASK: own}, own if by_row else real


def _checked_dict(metrics: Any) -> dict[str, PyTree]:
    if not isinstance(metrics, dict):
        raise ArgumentError(
            "`eval_fn` must return a dict of metrics, got "
            f"`{type(metrics).__name__}`. Return them alone, each under its name."
        )
    if EXAMPLES in metrics:
        raise ArgumentError(
            f"`eval_fn` must leave the name `{EXAMPLES}` to the count of examples, got "
            "a metric of that name. Rename it."
        )
    refuse_keys("eval_fn", metrics)
    return jax.tree.map(jnp.asarray, metrics)


def _count(totals: MetricTotals, blocks: _Blocks) -> None:
    """Fetch what a call found, and count it block by block, in example order."""
    # Every process has the blocks of all, so all come to the same numbers, and decide
    # the same.
    found = jax.device_get(blocks)
    for index, real in enumerate(found.real):
        rows = BlockRows(
            real=int(real),
            weights=found.weights[index],
            replica=index // BLOCKS_PER_CALL,
        )
        totals.add(jax.tree.map(lambda x, i=index: x[i], found.metrics), rows)


def _follow(jaxpr: core.Jaxpr, state: PyTree, rows: PyTree) -> list[frozenset[int]]:
    """Tell of each output of a program whether it follows from batch and mask."""
    given = {BATCH: jax.tree.map(lambda _: DATA_MARK, rows[BATCH]), MASK: MASK_MARK}
    marks = [frozenset()] * len(jax.tree.leaves(state)) + jax.tree.leaves(given)
    return dataflow.flow(jaxpr, marks, dataflow.DependsOn())
