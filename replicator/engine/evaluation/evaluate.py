"""Evaluate a state on every example of a dataset, each counted once.

Blocks of examples are run by `blocks`; the host adds up their results in example order,
in float64. Rows that fill up the last blocks have weight 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicator.base.tracebacks import short_tracebacks
from replicator.base.types import Dataset, PyTree
from replicator.collectives.context.keys import refuse_keys
from replicator.engine.analysis.lookup_hints import explained
from replicator.engine.evaluation.blocks import DEFAULT_BLOCK, Block, BlockRunner
from replicator.engine.layout import Layout
from replicator.engine.metrics.exact import check_exact
from replicator.engine.metrics.totals import BlockRows, MetricTotals
from replicator.engine.require_eager import eager
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.errors import ArgumentError, check_function
from replicator.inputs.options import InputOptions
from replicator.inputs.remainder import MASK

EvalFn = Callable[[PyTree, PyTree], dict[str, PyTree]]
"""`eval_fn(state, batch) -> metrics`: the function of one replica, of one block."""

EXAMPLES = "examples"


@short_tracebacks
class Evaluation:
    """An evaluation on all replicas: `metrics = evaluation(state, dataset)`.

    Make it once and call it often: compiled programs are kept.

    Args:
      eval_fn: `eval_fn(state, batch)` gets a block of examples, and returns a dict of
        metrics. A plain array has one row per example, and is averaged. Other metrics
        are declared: `Mean(value, weight)`, `Sum`, `Max`, `Min`, `PerReplica`, and
        weighted by `batch["mask"]`, 0 for rows that only fill up, which dicts of
        batches get. A mask of the dataset's own is multiplied by it; if that has one
        number per example, it weights the rows of plain arrays. `Concat` keeps its
        rows: one for each example, in the order of the dataset.
      layout: Layout of the replicas on devices.
      block: Number of examples that `eval_fn` gets at a time. Bits depend on it.
      max_in_flight: Largest number of calls dispatched and not yet finished.

    Raises:
      ArgumentError: `eval_fn` is not a function of a state and a batch, or `block` is
        below 1.
    """

    def __init__(
        self,
        eval_fn: EvalFn,
        layout: Layout,
        *,
        block: int = DEFAULT_BLOCK,
        max_in_flight: int = DEFAULT_RUN_AHEAD,
    ) -> None:
        check_function("eval_fn", eval_fn, "state, batch")
        self._num_replicas = layout.num_replicas
        self._runner = BlockRunner(
            lambda *given: _evaluated(eval_fn, *given),
            layout,
            name="eval_fn",
            block=block,
            check=check_exact,
            max_in_flight=max_in_flight,
        )

    @eager("evaluate")
    def __call__(
        self,
        state: PyTree,
        dataset: Dataset,
        *,
        inputs: InputOptions | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, PyTree]:
        """Evaluate `state` on every example of `dataset`; wait for the result.

        Args:
          state: State of `rep.init`, a compiled step or `result.state`; it is neither
            changed nor donated.
          dataset: An iterable of batches of any sizes, or `input_fn(context)`, that
            ends. It is read once.
          inputs: Options of the input; its `steps` count batches of the dataset, and
            its `accumulate`, `steps_per_call`, `epochs` and `remainder` have no effect.
          between: Called after each block, in all processes alike; may raise, to end
            the evaluation.

        Returns:
          The metrics over all examples: Python numbers, and NumPy arrays for a metric
          that is not a scalar. `examples` is the number of examples.

        Raises:
          ArgumentError: `eval_fn` returns a metric that could not be exact, or JAX
            traces the call.
          BatchError: The dataset is empty, or its batches do not fit each other.
          NonFiniteError: A batch holds NaN.
        """
        totals = MetricTotals(num_replicas=self._num_replicas)

        def take(block: Block) -> None:
            metrics, weights = block.outputs
            rows = BlockRows(real=block.real, weights=weights, replica=block.replica)
            totals.add(metrics, rows)
            between()

        self._runner.run(state, dataset, take, inputs=inputs)
        return {**totals.merged(), EXAMPLES: totals.examples}


def _evaluated(
    eval_fn: EvalFn, state: PyTree, batch: PyTree, real: jax.Array
) -> tuple[dict[str, PyTree], jax.Array]:
    """Return the metrics of a block, and the weight of each of its rows."""
    batch, weights = _with_mask(batch, real)
    with explained(state, batch):
        return _checked_dict(eval_fn(state, batch)), weights


def _with_mask(batch: PyTree, real: jax.Array) -> tuple[PyTree, jax.Array]:
    """Put the mask into a dict, times its own; return also the weight of each row."""
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
