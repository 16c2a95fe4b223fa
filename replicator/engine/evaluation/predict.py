"""Predict for every example of a dataset, in order, with the same bits anywhere."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from replicator.base.tracebacks import short_tracebacks
from replicator.base.trees import describe, named_leaves
from replicator.base.types import Dataset, PyTree
from replicator.engine.analysis.lookup_hints import explained
from replicator.engine.evaluation import blocks
from replicator.engine.layout import Layout
from replicator.engine.require_eager import eager
from replicator.engine.run_ahead import DEFAULT_RUN_AHEAD
from replicator.errors import ArgumentError, check_function
from replicator.inputs.options import InputOptions

PredictFn = Callable[[PyTree, PyTree], PyTree]
"""`predict_fn(state, batch) -> rows`: the function of one replica, of one block."""


@short_tracebacks
class Prediction:
    """A prediction on all replicas: `rows = prediction(state, dataset)`.

    Args:
      predict_fn: Gets a block of examples, and returns a pytree of arrays with one row
        for each. Some examples of the last block only fill up; their rows are dropped.
      layout: Layout of the replicas on devices.
      block: Number of examples that `predict_fn` gets at a time. Bits depend on it.
      max_in_flight: Largest number of calls dispatched and not yet finished.

    Raises:
      ArgumentError: `predict_fn` is not a function of a state and a batch, or `block`
        is below 1.
    """

    def __init__(
        self,
        predict_fn: PredictFn,
        layout: Layout,
        *,
        block: int = blocks.DEFAULT_BLOCK,
        max_in_flight: int = DEFAULT_RUN_AHEAD,
    ) -> None:
        check_function("predict_fn", predict_fn, "state, batch")

        def run(state: PyTree, batch: PyTree, real: jax.Array) -> PyTree:
            del real
            with explained(state, batch):
                return jax.tree.map(jnp.asarray, predict_fn(state, batch))

        self._runner = blocks.BlockRunner(
            run,
            layout,
            name="predict_fn",
            block=block,
            check=_check_rows,
            max_in_flight=max_in_flight,
        )

    @eager("predict")
    def __call__(
        self, state: PyTree, dataset: Dataset, *, inputs: InputOptions | None = None
    ) -> PyTree:
        """Predict for every example of `dataset`; wait for the result.

        Args:
          state: As in `Evaluation`.
          dataset: As in `Evaluation`.
          inputs: As in `Evaluation`.

        Returns:
          The rows of `predict_fn` for all examples, in the order of the dataset: NumPy
          leaves [examples, ...].
        """
        kept: list[PyTree] = []

        def take(block: blocks.Block) -> None:
            kept.append(jax.tree.map(lambda rows: rows[block.real], block.outputs))

        self._runner.run(state, dataset, take, inputs=inputs)
        return jax.tree.map(lambda *parts: np.concatenate(parts), *kept)


def _check_rows(traced: blocks.TracedBlocks) -> None:
    doubled = jax.tree.leaves(traced.doubled)
    leaves = named_leaves(traced.outputs)
    if not leaves:
        _refuse("nothing")
    for (path, leaf), other in zip(leaves, doubled, strict=True):
        if not blocks.has_rows(leaf, other, traced.block):
            found = describe(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype))
            _refuse(f"{found} for `{path}`" if path else found)


def _refuse(found: str) -> None:
    raise ArgumentError(
        f"`predict_fn` must return one row per example, got {found}. Leave examples in "
        "the first axis; for sums and means use `evaluate`."
    )
