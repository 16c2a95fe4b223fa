"""Refuse the metrics of an evaluation that would silently not be exact.

Each block of examples may end in rows that only fill up. A metric counts every example
once if it has one row per example (then the host weights the rows), or if its value
follows from the block's mask, by a walk over the program's jaxpr.
"""

from typing import NamedTuple

import jax

from replicator.base.trees import describe, named_leaves
from replicator.engine.analysis import dataflow
from replicator.engine.evaluation.blocks import TracedBlocks, has_rows
from replicator.engine.metrics import declared as metrics
from replicator.errors import ArgumentError
from replicator.inputs.remainder import MASK

DATA_MARK: frozenset[int] = frozenset({0})
MASK_MARK: frozenset[int] = frozenset({1})


def check_exact(traced: TracedBlocks) -> None:
    """Check every metric that a block reports.

    Args:
      traced: The program; its outputs are the metrics, and the weight of each row.

    Raises:
      ArgumentError: A metric could not be merged exactly.
    """
    marks = _follow(traced)
    others = jax.tree.leaves(traced.doubled)
    for path, metric in named_leaves(traced.outputs[0], is_leaf=metrics.is_metric):
        own = jax.tree.leaves(metric)
        leaves = [
            _Leaf(
                text=describe(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)),
                scalar=leaf.ndim == 1,
                by_row=has_rows(leaf, other, traced.block),
                data=mark >= DATA_MARK,
                mask=mark >= MASK_MARK,
            )
            for leaf, other, mark in zip(own, others, marks, strict=False)
        ]
        others, marks = others[len(own) :], marks[len(own) :]
        if isinstance(metric, metrics.Concat) or not metrics.is_metric(metric):
            _check_rows(path, metric, *leaves)
        else:
            _check_declared(path, metric, leaves)


class _Leaf(NamedTuple):
    """Facts about one array of a metric, before a program runs."""

    text: str  # its dtype and shape in one block
    scalar: bool
    by_row: bool  # has one row per example
    data: bool  # follows from the batch
    mask: bool  # follows from the batch's mask


def _check_rows(path: str, metric: object, leaf: _Leaf) -> None:
    if leaf.by_row:
        return
    if isinstance(metric, metrics.Concat):
        raise ArgumentError(
            f"`eval_fn` must return one row per example for `{path}`, a `Concat`, got "
            f"{leaf.text}. Leave examples in the first axis, or declare it otherwise."
        )
    raise ArgumentError(
        "`eval_fn` must return one row per example for a plain metric, got "
        f"{leaf.text} for `{path}`. Leave the mean over examples to the "
        "evaluation, or declare it: `Mean(value, weight)`, `Sum` or `Max`."
    )


def _check_declared(path: str, metric: metrics.Metric, leaves: list[_Leaf]) -> None:
    kind = type(metric).__name__
    for leaf in leaves:
        if leaf.by_row:
            raise ArgumentError(
                f"`eval_fn` must reduce `{path}`, a `{kind}`, over its examples, got "
                f"{leaf.text}. Return the array itself for its mean over examples."
            )
    if isinstance(metric, metrics.Mean):
        _check_weight(path, leaves[1:])
    if isinstance(metric, metrics.Max | metrics.Min):
        return  # padding repeats examples that are there: it changes neither
    must_read = (
        leaves if isinstance(metric, metrics.Sum) else [x for x in leaves if x.data]
    )
    if not all(leaf.mask for leaf in must_read):
        _refuse_unmasked(path, kind)


def _check_weight(path: str, weight: list[_Leaf]) -> None:
    if not weight or not weight[0].scalar:
        raise ArgumentError(
            f"`eval_fn` must give `{path}`, a `Mean`, a scalar weight, got "
            f"{weight[0].text if weight else None}. Pass the number of its examples: "
            f'`Mean(value, batch["{MASK}"].sum())`.'
        )
    if not weight[0].mask:
        _refuse_unmasked(path, "Mean")


def _refuse_unmasked(path: str, kind: str) -> None:
    raise ArgumentError(
        f'`eval_fn` must weight `{path}`, a `{kind}`, by `batch["{MASK}"]`, which is 0 '
        "for padding, got no use of it. Multiply by it, or return one row per example."
    )


def _follow(traced: TracedBlocks) -> list[frozenset[int]]:
    """Return for each output of a program whether it follows from batch and mask."""
    rows = jax.tree.map(lambda _: DATA_MARK, traced.rows)
    marks = jax.tree.leaves({**rows, MASK: MASK_MARK})
    unmarked = [frozenset()] * len(jax.tree.leaves(traced.state))
    return dataflow.flow(traced.jaxpr, [*unmarked, *marks], dataflow.DependsOn())
